-- Fixed window. Twin of limitgate/algorithms/fixed_window.py.
--
-- Bucket: used requests and remaining time of the current window. Charge: burst, cost, period, alignment, three
-- calendar window ends. Adjustment: requests to return, and for how long they can be returned.

local USED, LEFT = FIRST, FIRST + 1
local BURST, COST, PERIOD, HOW, ENDS = 1, 2, 3, 4, 5
local BY_FIRST_REQUEST, BY_DATE = 1, 2
local MAX_USED = 2^50
-- A clock change makes a window at most this much longer.
local DAY = 86400 * 1000000

-- Remaining time of the current window. If the caller's clock was far off, its window ends only give the time of
-- day.
local function left(bucket, charge)
  if charge[HOW] == BY_FIRST_REQUEST then
    return bucket[USED] > 0 and bucket[LEFT] or charge[PERIOD]
  elseif charge[HOW] == BY_DATE and charge[ENDS] - now <= charge[PERIOD] + DAY then
    for place = ENDS, ENDS + 2 do
      if charge[place] > now then return charge[place] - now end
    end
  end
  return charge[PERIOD] - (now - charge[ENDS + 2]) % charge[PERIOD]
end

local function begin(bucket, charge)
  if not bucket[USED] then bucket[USED], bucket[LEFT] = 0, 0 end
  bucket[LEFT] = left(bucket, charge)
end

return {
  charge_format = 'ddddddd',
  adjustment_format = 'dd',
  layout = function(size) return size == 14 and 'I7I7' end,
  advance = function(bucket, elapsed, charge)
    if bucket[USED] > MAX_USED or bucket[LEFT] > charge[PERIOD] + DAY then
      bucket[USED], bucket[LEFT] = 0, 0
      return true
    elseif elapsed < bucket[LEFT] then
      bucket[LEFT] = bucket[LEFT] - elapsed
    else
      bucket[USED], bucket[LEFT] = 0, 0
    end
  end,
  check = function(bucket, charge)
    begin(bucket, charge)
    reply[#reply + 1] = bucket[USED]
    reply[#reply + 1] = bucket[LEFT]
    return bucket[USED] + charge[COST] <= charge[BURST]
  end,
  commit = function(bucket, charge)
    bucket[USED] = bucket[USED] + charge[COST]
  end,
  reset = function(bucket, charge)
    bucket[USED], bucket[LEFT] = 0, 0
  end,
  apply_adjustment = function(bucket, charge)
    begin(bucket, charge)
    local back, grace = charge.adjustment[1], charge.adjustment[2]
    if back < 0 or math.max(0, now - charge.as_of) < grace then
      bucket[USED] = math.min(math.max(0, bucket[USED] - back), MAX_USED)
    end
  end,
  encode = function(bucket)
    if bucket[USED] and bucket[USED] > 0 then return 'I7I7', LEFT, bucket[LEFT] end
  end,
}

--PLAIN
--names
local burst$w, cost$w, period$w, how$w --window
--asked
burst$w, cost$w, period$w, how$w, place = unpack('<dddd', text, place) --window
--charge
local used$w, left$w = 0, 0 --window
if value and #value ~= 22 then
  is_known = false
elseif value then
  local version, written, used, left = unpack('<BI7I7I7', value)
  local elapsed = now - written
  if version ~= VERSION or elapsed < 0 or used > 2^50 or left > period$w + 86400 * 1000000 then is_known = false end --window
  if elapsed < left then used$w, left$w = used, left - elapsed end --window
end
if how$w == 0 then left$w = period$w - now % period$w elseif used$w == 0 then left$w = period$w end --window
if used$w + cost$w > burst$w then fits$b = false end --window
reply[size + $r], reply[size + ($r + 1)] = used$w, left$w --window
--value
value, lifetime = pack('<BI7I7I7', VERSION, now, used$w + cost$w, left$w), left$w --window
