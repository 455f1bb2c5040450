-- GCRA. Twin of limitgate/algorithms/gcra.py. The part after PLAIN is for plain.lua and refund.lua and repeats
-- check, commit and apply_adjustment.
--
-- Bucket, per window: id, count and debt. Charge, per window: id, count, tolerance (from the burst) and increment.
-- Adjustment, per window: increment of one request, amount to return, and grace. Reported per window: the debt.
--
-- An amount of time is two numbers: whole microseconds and a rest over count, both exact in doubles.

local WINDOW, WINDOW_SIZE, WINDOW_FIELDS = 'I6I6I7I6', 25, 4
local CHARGE_FIELDS, ADJUSTMENT_FIELDS = 6, 5

-- Format of a bucket with this many bytes.
local function layout(size)
  local count = size / WINDOW_SIZE
  return count == floor(count) and WINDOW:rep(count)
end

-- Advance a bucket in time. Return true if a value was invalid and has been cleared.
local function advance(bucket, elapsed)
  local broken = false
  for at = FIRST, #bucket, WINDOW_FIELDS do
    local count, whole, rest = bucket[at + 1], bucket[at + 2], bucket[at + 3]
    if rest >= count or whole > MAX_OWED then broken, whole = true, -1 end
    if whole < elapsed then
      bucket[at + 2], bucket[at + 3] = 0, 0
    else
      bucket[at + 2] = whole - elapsed
    end
  end
  return broken
end

-- Find a window in a bucket, usually at the expected place. A new window has no debt. A debt under another count is
-- converted, so that the promised times hold.
local function find(bucket, id, count, expected)
  local place = expected
  if bucket[place] ~= id then
    place = FIRST
    while bucket[place] and bucket[place] ~= id do place = place + WINDOW_FIELDS end
    if not bucket[place] then
      bucket[place], bucket[place + 1], bucket[place + 2], bucket[place + 3] = id, count, 0, 0
    end
  end
  local old, whole, rest = bucket[place + 1], bucket[place + 2], bucket[place + 3]
  if old ~= count then
    bucket[place + 1] = count
    if whole > 0 or rest > 0 then
      bucket[place + 2], bucket[place + 3] = rescaled(whole, rest, old, count)
      bucket.changed = true
    end
  end
  return place
end

-- Report the debts of the charge's windows. Return true if the charge fits into all of them.
local function check(bucket, charge)
  local fits, expected, n = true, FIRST, #reply
  for at = 1, #charge, CHARGE_FIELDS do
    local id, count, tolerance, tolerance_rest, increment, increment_rest = values(charge, at, at + 5)
    local place = expected
    if bucket[place] ~= id or bucket[place + 1] ~= count then place = find(bucket, id, count, expected) end
    local whole, rest = bucket[place + 2], bucket[place + 3]
    reply[n + 1], reply[n + 2] = whole, rest
    whole, rest = whole + increment, rest + increment_rest
    if rest >= count then whole, rest = whole + 1, rest - count end
    if whole > tolerance or (whole == tolerance and rest > tolerance_rest) then fits = false end
    expected, n = place + WINDOW_FIELDS, n + 2
  end
  return fits
end

-- Add amounts from a list to each window of a charge, starting at a place, with this many fields per window.
local function add(bucket, charge, amounts, place, fields)
  local expected = FIRST
  for at = 1, #charge, CHARGE_FIELDS do
    local count = charge[at + 1]
    expected = find(bucket, charge[at], count, expected)
    local whole, rest = bucket[expected + 2] + amounts[place], bucket[expected + 3] + amounts[place + 1]
    if rest >= count then whole, rest = whole + 1, rest - count end
    bucket[expected + 2], bucket[expected + 3] = whole, rest
    expected, place = expected + WINDOW_FIELDS, place + fields
  end
end

-- Time until a charge fits into all its windows. A tolerance includes the maximum wait.
local function wait(bucket, charge)
  local longest, expected = 0, FIRST
  for at = 1, #charge, CHARGE_FIELDS do
    expected = find(bucket, charge[at], charge[at + 1], expected)
    local whole = bucket[expected + 2] + charge[at + 4] - charge[at + 2]
    local rest = bucket[expected + 3] + charge[at + 5] - charge[at + 3]
    longest = math.max(longest, whole + math.ceil(rest / charge[at + 1]) + charge.max_wait)
    expected = expected + WINDOW_FIELDS
  end
  return longest
end

-- Block the bucket until a turn by raising its debt to the time until then.
local function hold(bucket, charge, turn)
  local expected = FIRST
  for at = 1, #charge, CHARGE_FIELDS do
    expected = find(bucket, charge[at], charge[at + 1], expected)
    if bucket[expected + 2] < turn then bucket[expected + 2], bucket[expected + 3] = turn, 0 end
    expected = expected + WINDOW_FIELDS
  end
end

-- Clear the windows of a charge.
local function reset(bucket, charge)
  for at = 1, #charge, CHARGE_FIELDS do
    local place = find(bucket, charge[at], charge[at + 1], FIRST)
    bucket[place + 2], bucket[place + 3] = 0, 0
  end
end

-- Return unused capacity, or, if negative, charge more. The amount has drained since, except during the grace,
-- while the bucket drained other debts. A future turn is not returned if others are queued behind it.
local function apply_adjustment(bucket, charge)
  local lease, elapsed, expected, place = charge.adjustment, math.max(0, now - charge.as_of), FIRST, 3
  for at = 1, #charge, CHARGE_FIELDS do
    local count = charge[at + 1]
    expected = find(bucket, charge[at], count, expected)
    local back, back_rest, since = lease[place], lease[place + 1], math.max(0, elapsed - lease[place + 2])
    local on_top = back < 0
    -- The debt would be less without later requests.
    local last = back + lease[place + 2] + 1 - elapsed
    if not on_top and (last > charge[at + 2] or (last == charge[at + 2] and back_rest > charge[at + 3])) then
      local whole, rest = bucket[expected + 2], bucket[expected + 3]
      if whole > last or (whole == last and rest >= back_rest) then back, back_rest, since = 0, 0, 0 end
    end
    back = on_top and back + since or back - since
    if on_top == (back < 0) then
      local whole, rest = bucket[expected + 2] - back, bucket[expected + 3] - back_rest
      if rest < 0 then whole, rest = whole - 1, rest + count end
      if whole < 0 then whole, rest = 0, 0 end
      if whole >= MAX_OWED then whole, rest = MAX_OWED, 0 end
      bucket[expected + 2], bucket[expected + 3] = whole, rest
    end
    expected, place = expected + WINDOW_FIELDS, place + ADJUSTMENT_FIELDS
  end
end

-- True if some amounts, listed as for add, fit into all windows of a charge in addition to the debt.
local function fits_besides(bucket, charge, amounts)
  local expected = FIRST
  for at = 1, #charge, CHARGE_FIELDS do
    local count, place = charge[at + 1], (at - 1) / CHARGE_FIELDS * 2 + 1
    expected = find(bucket, charge[at], count, expected)
    local whole, rest = bucket[expected + 2] + amounts[place], bucket[expected + 3] + amounts[place + 1]
    if rest >= count then whole, rest = whole + 1, rest - count end
    if whole > charge[at + 2] or (whole == charge[at + 2] and rest > charge[at + 3]) then return false end
    expected = expected + WINDOW_FIELDS
  end
  return true
end

-- Lease whole requests, as many as fit up to the lease's maximum, by binary search over powers of two.
local function take_more(bucket, charge)
  local steps = {{}}
  for place = 1, #charge.adjustment, ADJUSTMENT_FIELDS do
    local n = #steps[1]
    steps[1][n + 1], steps[1][n + 2] = charge.adjustment[place], charge.adjustment[place + 1]
  end
  while 2^#steps <= charge.most do
    local step, doubled = steps[#steps], {}
    for n = 1, #step, 2 do
      local count = charge[(n - 1) / 2 * CHARGE_FIELDS + 2]
      local whole, rest = step[n] * 2, step[n + 1] * 2
      if rest >= count then whole, rest = whole + 1, rest - count end
      doubled[n], doubled[n + 1] = whole, rest
    end
    steps[#steps + 1] = doubled
  end
  local left = charge.most
  for power = #steps, 1, -1 do
    local requests = 2^(power - 1)
    if requests <= left and fits_besides(bucket, charge, steps[power]) then
      add(bucket, charge, steps[power], 1, 2)
      left = left - requests
    end
  end
end

-- Format of a bucket without windows that have no debt, its number of values, and its lifetime in µs, rounded up.
-- Returns nothing without debt.
local function encode(bucket)
  local lifetime, size = 0, FIRST
  for at = FIRST, #bucket, WINDOW_FIELDS do
    local id, count, whole, rest = values(bucket, at, at + 3)
    if whole > 0 or rest > 0 then
      if size < at then bucket[size], bucket[size + 1], bucket[size + 2], bucket[size + 3] = id, count, whole, rest end
      size = size + WINDOW_FIELDS
      if rest > 0 then whole = whole + 1 end
      if whole > lifetime then lifetime = whole end
    end
  end
  if lifetime > 0 then return WINDOW:rep((size - FIRST) / WINDOW_FIELDS), size - 1, lifetime end
end

return {
  charge_format = 'dddddd',
  adjustment_format = 'ddddd',
  layout = layout,
  advance = advance,
  check = check,
  wait = wait,
  commit = function(bucket, charge, turn)
    if turn > 0 then hold(bucket, charge, turn) end
    add(bucket, charge, charge, 5, CHARGE_FIELDS)
    if charge.most > 0 then take_more(bucket, charge) end
  end,
  reset = reset,
  apply_adjustment = apply_adjustment,
  encode = encode,
}

--PLAIN
--names
local mark$w, count$w, tolerance$w, tolerance_rest$w, increment$w, increment_rest$w --window
local layout$b = '<BI7' .. ('c12I7I6'):rep($windows)
--asked
mark$w, count$w, tolerance$w, tolerance_rest$w, increment$w, increment_rest$w, place = unpack('<c12ddddd', text, place) --window
--read
local after$w, after_rest$w = 0, 0 --window
if value and #value ~= 8 + 25 * $windows then
  is_known = false
elseif value then
  local version, written,
    stored$w, owed$w, owed_rest$w, --window
    _ = unpack(layout$b, value)
  local elapsed = now - written
  if version ~= VERSION or elapsed < 0 then is_known = false end
  if stored$w ~= mark$w or owed_rest$w >= count$w or owed$w > MAX_OWED then is_known = false end --window
  if owed$w >= elapsed then after$w, after_rest$w = owed$w - elapsed, owed_rest$w end --window
end
--charge
reply[size + $r], reply[size + ($r + 1)] = after$w, after_rest$w --window
after$w, after_rest$w = after$w + increment$w, after_rest$w + increment_rest$w --window
if after_rest$w >= count$w then after$w, after_rest$w = after$w + 1, after_rest$w - count$w end --window
if after$w > tolerance$w or (after$w == tolerance$w and after_rest$w > tolerance_rest$w) then fits$b = false end --window
--value
lifetime = 0
if after$w >= lifetime then lifetime = after_rest$w > 0 and after$w + 1 or after$w end --window
value = pack(layout$b, VERSION, now,
  mark$w, after$w, after_rest$w, --window
  0)
--refund
do
  local back$w, last$w = increment$w - max(0, since - grace$w), increment$w + grace$w + 1 - since --window
  local is_turn$w = last$w > tolerance$w or (last$w == tolerance$w and increment_rest$w > tolerance_rest$w) --window
  if is_turn$w and (after$w > last$w or (after$w == last$w and after_rest$w >= increment_rest$w)) then back$w = -1 end --window
  if back$w >= 0 then after$w, after_rest$w = after$w - back$w, after_rest$w - increment_rest$w end --window
  if after_rest$w < 0 then after$w, after_rest$w = after$w - 1, after_rest$w + count$w end --window
  if after$w < 0 then after$w, after_rest$w = 0, 0 end --window
end
