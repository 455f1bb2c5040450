-- Sliding window with two counters. Twin of limitgate/algorithms/sliding_window.py.
--
-- Bucket: used requests of the current and of the previous window, and the remaining time of the current one.
-- Charge: burst, cost, period. Adjustment: requests to return, and the remaining window time at their charge.
-- Reported: the same as in a bucket.

local CURRENT, PREVIOUS, LEFT = FIRST, FIRST + 1, FIRST + 2
local BURST, COST, PERIOD = 1, 2, 3
local MAX_USED = 2^50

-- Align the window to the calendar, for new buckets and after a clock step.
local function begin(bucket, charge)
  if not bucket[CURRENT] then bucket[CURRENT], bucket[PREVIOUS] = 0, 0 end
  bucket[LEFT] = charge[PERIOD] - now % charge[PERIOD]
  bucket.period = charge[PERIOD]
end

return {
  charge_format = 'ddd',
  adjustment_format = 'dd',
  layout = function(size) return size == 21 and 'I7I7I7' end,
  advance = function(bucket, elapsed, charge)
    local current, previous, left, period = bucket[CURRENT], bucket[PREVIOUS], bucket[LEFT], charge[PERIOD]
    if current > MAX_USED or previous > MAX_USED or left > period then
      bucket[CURRENT], bucket[PREVIOUS] = 0, 0
      return true
    elseif elapsed >= left then
      bucket[CURRENT], bucket[PREVIOUS] = 0, elapsed < left + period and current or 0
    end
  end,
  check = function(bucket, charge)
    begin(bucket, charge)
    local current, previous, left = values(bucket, CURRENT, LEFT)
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = current, previous, left
    local counting, rest = 0, 0
    if previous > 0 then counting, rest = multiplied(previous, left, charge[PERIOD]) end
    if rest > 0 then counting = counting + 1 end
    return current + counting + charge[COST] <= charge[BURST]
  end,
  commit = function(bucket, charge)
    bucket[CURRENT] = bucket[CURRENT] + charge[COST]
  end,
  reset = function(bucket, charge)
    bucket[CURRENT], bucket[PREVIOUS] = 0, 0
  end,
  apply_adjustment = function(bucket, charge)
    begin(bucket, charge)
    local back, grace, elapsed = charge.adjustment[1], charge.adjustment[2], math.max(0, now - charge.as_of)
    if back < 0 then
      bucket[CURRENT] = math.min(bucket[CURRENT] - back, MAX_USED)
    elseif elapsed < grace + charge[PERIOD] then
      local here = elapsed < grace and math.min(back, bucket[CURRENT]) or 0
      bucket[CURRENT], bucket[PREVIOUS] = bucket[CURRENT] - here, math.max(0, bucket[PREVIOUS] - (back - here))
    end
  end,
  encode = function(bucket)
    local lifetime = bucket[CURRENT] > 0 and bucket[LEFT] + bucket.period or bucket[PREVIOUS] > 0 and bucket[LEFT]
    if lifetime then return 'I7I7I7', LEFT, lifetime end
  end,
}

--PLAIN
--names
local burst$w, cost$w, period$w --window
--asked
burst$w, cost$w, period$w, place = unpack('<ddd', text, place) --window
--charge
local current$w, previous$w, left$w = 0, 0, period$w - now % period$w --window
if value and #value ~= 29 then
  is_known = false
elseif value then
  local version, written, current, previous, left = unpack('<BI7I7I7I7', value)
  local elapsed = now - written
  if version ~= VERSION or elapsed < 0 or current > 2^50 or previous > 2^50 or left > period$w then is_known = false end --window
  if elapsed < left then current$w, previous$w = current, previous --window
  elseif elapsed < left + period$w then previous$w = current end --window
end
local counting$w, room$w = previous$w * left$w, (burst$w - cost$w - current$w) * period$w --window
if counting$w > room$w then fits$b = false end --window
-- Products too large to be exact, and almost equal, are left to spend.lua.
if counting$w >= 2^53 and math.abs(counting$w - room$w) < counting$w / 2^50 then is_known = false end --window
reply[size + $r], reply[size + ($r + 1)], reply[size + ($r + 2)] = current$w, previous$w, left$w --window
--value
value, lifetime = pack('<BI7I7I7I7', VERSION, now, current$w + cost$w, previous$w, left$w), left$w + period$w --window
