-- Carries out plans one after the other, each wholly or not at all, and reports what every bucket owed before.
-- Twin of limitgate/stores/memory.py.
--
-- KEYS      the buckets, one per charge, plan after plan.
-- ARGV[1]   for each key the number of its charge, 16 bits.
-- ARGV[n+1] charge n, packed: verb, 1 if this bucket may refuse, 1 if the plan ends here, the number of windows, then for
--           each its id, count, tolerance and increment; then, if the bucket is leased from, the lease.
-- Verbs     's'pend, 'p'eek (charge nothing) and 'r'eset (the asked windows start full).
-- Reply     {now, unreadable values, clock steps, 1 if there was no memory to write, debt, debt, ...}.
--
-- An amount of time is two numbers: whole microseconds and a rest over count, both exact in doubles. A bucket is one
-- string: version, time of writing in Unix µs, then per window its id, count and debt. It is read once, kept as a list of
-- these numbers with the debts as they stand now, and written once at the end if anything in it changed.

local VERSION = 1
local HEADER, HEADER_SIZE, HEADER_FIELDS = '<BI7', 8, 2
local WINDOW, WINDOW_SIZE, WINDOW_FIELDS = 'I6I6I7I6', 25, 4
local CHARGE, CHARGE_SIZE = '<c1BBH', 5
local ASKED, ASKED_SIZE, ASKED_FIELDS = 'dddddd', 48, 6
local LEASE, LEASED, LEASED_FIELDS = '<dd', 'ddddd', 5
local FIRST = HEADER_FIELDS + 1
local MAX_OWED = 2^52
local floor, pack, unpack, values = math.floor, struct.pack, struct.unpack, unpack

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply = {now, 0, 0, 0}
local UNREADABLE, STEPS, UNWRITTEN = 2, 3, 4

-- The numbers packed in a text from a place on.
local function numbers(format, text, place)
  local found = {unpack(format, text, place)}
  found[#found] = nil  -- where reading ended
  return found
end

-- What is left of an amount after some microseconds.
local function drained(whole, rest, elapsed)
  if whole < elapsed then return 0, 0 end
  return whole - elapsed, rest
end

-- The debt (whole, rest over old) as (whole, rest over new): the same number of requests under another count.
-- Exact long multiplication, bit by bit, since whole * old does not fit a double.
local function rescaled(whole, rest, old, new)
  local quotient, left = 0, 0
  local old_whole, old_left = floor(old / new), old % new
  local bit = 2^52
  while bit >= 1 do
    quotient, left = quotient * 2, left * 2
    if left >= new then quotient, left = quotient + 1, left - new end
    if whole >= bit then
      whole = whole - bit
      quotient, left = quotient + old_whole, left + old_left
      if left >= new then quotient, left = quotient + 1, left - new end
    end
    bit = bit / 2
  end
  left = left + rest
  quotient, left = quotient + floor(left / new), left % new
  if quotient >= MAX_OWED then return MAX_OWED, 0 end
  return quotient, left
end

-- A bucket as it stands now. What is not ours or makes no sense is left out and counted.
local function open(key)
  local value = redis.pcall('GET', key)
  if not value then return {VERSION, now} end
  local count = type(value) == 'string' and (#value - HEADER_SIZE) / WINDOW_SIZE or -1
  if count < 0 or count ~= floor(count) or string.byte(value) ~= VERSION then
    redis.call('DEL', key)
    reply[UNREADABLE] = reply[UNREADABLE] + 1
    return {VERSION, now}
  end
  local bucket = numbers(HEADER .. WINDOW:rep(count), value, 1)
  local elapsed = now - bucket[2]
  if elapsed < 0 then
    elapsed, reply[STEPS], bucket.changed = 0, reply[STEPS] + 1, true
  end
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
  if broken then bucket.changed, reply[UNREADABLE] = true, reply[UNREADABLE] + 1 end
  return bucket
end

-- Where a window stands in a bucket, mostly where expected. One that is new owes nothing; one whose count has changed
-- goes on under the new count, so that what is promised now holds.
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

-- A charge, as the list of what is asked of its windows.
local function decode(text)
  local verb, binding, last, windows = unpack(CHARGE, text)
  local charge = numbers('<' .. ASKED:rep(windows), text, CHARGE_SIZE + 1)
  charge.verb, charge.binding, charge.last = verb, binding == 1, last == 1
  charge.takes = charge[5] > 0 or charge[6] > 0
  local place = CHARGE_SIZE + windows * ASKED_SIZE + 1
  if place < #text then
    charge.most, charge.as_of = unpack(LEASE, text, place)
    charge.lease = numbers('<' .. LEASED:rep(windows), text, place + 16)
  end
  return charge
end

-- Report what the asked windows owe. True if the charge fits into all of them, decided on the state after it.
local function weigh(bucket, charge)
  local fits, expected, n = true, FIRST, #reply
  for at = 1, #charge, ASKED_FIELDS do
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
  return fits or not charge.takes
end

-- Add to each asked window what stands in a list for it: two numbers from a place on, so many numbers per window.
local function add(bucket, charge, amounts, place, fields)
  local expected = FIRST
  for at = 1, #charge, ASKED_FIELDS do
    local count = charge[at + 1]
    expected = find(bucket, charge[at], count, expected)
    local whole, rest = bucket[expected + 2] + amounts[place], bucket[expected + 3] + amounts[place + 1]
    if rest >= count then whole, rest = whole + 1, rest - count end
    bucket[expected + 2], bucket[expected + 3] = whole, rest
    expected, place = expected + WINDOW_FIELDS, place + fields
  end
  bucket.changed = true
end

-- The asked windows start full.
local function clear(bucket, charge)
  for at = 1, #charge, ASKED_FIELDS do
    local place = find(bucket, charge[at], charge[at + 1], FIRST)
    bucket[place + 2], bucket[place + 3] = 0, 0
  end
  bucket.changed = true
end

-- Put back what was taken before and not used, or, where that is negative, take on top what should have been taken.
-- Except while the bucket drained other debts, it drained meanwhile.
local function give_back(bucket, charge)
  local lease, elapsed, expected, place = charge.lease, math.max(0, now - charge.as_of), FIRST, 3
  for at = 1, #charge, ASKED_FIELDS do
    local count = charge[at + 1]
    expected = find(bucket, charge[at], count, expected)
    local back, back_rest, since = lease[place], lease[place + 1], math.max(0, elapsed - lease[place + 2])
    local on_top = back < 0
    back = on_top and back + since or back - since
    if on_top == (back < 0) then
      local whole, rest = bucket[expected + 2] - back, bucket[expected + 3] - back_rest
      if rest < 0 then whole, rest = whole - 1, rest + count end
      if whole < 0 then whole, rest = 0, 0 end
      if whole >= MAX_OWED then whole, rest = MAX_OWED, 0 end
      bucket[expected + 2], bucket[expected + 3] = whole, rest
    end
    expected, place = expected + WINDOW_FIELDS, place + LEASED_FIELDS
  end
  bucket.changed = true
end

-- Whether some amounts, listed as for add, fit into all asked windows besides what is owed.
local function fits_besides(bucket, charge, amounts)
  local expected = FIRST
  for at = 1, #charge, ASKED_FIELDS do
    local count, place = charge[at + 1], (at - 1) / ASKED_FIELDS * 2 + 1
    expected = find(bucket, charge[at], count, expected)
    local whole, rest = bucket[expected + 2] + amounts[place], bucket[expected + 3] + amounts[place + 1]
    if rest >= count then whole, rest = whole + 1, rest - count end
    if whole > charge[at + 2] or (whole == charge[at + 2] and rest > charge[at + 3]) then return false end
    expected = expected + WINDOW_FIELDS
  end
  return true
end

-- Take further whole requests, as many as fit but no more than the lease allows: their number bit by bit, the highest first.
local function take_more(bucket, charge)
  local steps = {{}}
  for place = 1, #charge.lease, LEASED_FIELDS do
    local n = #steps[1]
    steps[1][n + 1], steps[1][n + 2] = charge.lease[place], charge.lease[place + 1]
  end
  while 2^#steps <= charge.most do
    local step, doubled = steps[#steps], {}
    for n = 1, #step, 2 do
      local count = charge[(n - 1) / 2 * ASKED_FIELDS + 2]
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

-- Write a bucket without the windows that owe nothing. It lives until none does, rounded up, or goes at once.
-- The error if that fails.
local function write(key, bucket)
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
  if lifetime == 0 then
    redis.call('DEL', key)
  else
    bucket[2] = now
    local format = HEADER .. WINDOW:rep((size - FIRST) / WINDOW_FIELDS)
    local done = redis.pcall('SET', key, pack(format, values(bucket, 1, size - 1)), 'PX', floor(lifetime / 1000) + 2)
    if done.err then return done end
  end
end

local opened, decoded = {}, {}  -- by key, by number
local buckets, charges, fits = {}, {}, {}
local first, admitted = 1, true

for i, key in ipairs(KEYS) do
  local number = unpack('<H', ARGV[1], 2 * i - 1)
  local bucket, charge = opened[key], decoded[number]
  if not bucket then
    bucket = open(key)
    opened[key] = bucket
  end
  if not charge then
    charge = decode(ARGV[number + 1])
    decoded[number] = charge
  end
  if charge.verb == 'r' then clear(bucket, charge) end
  if charge.lease then give_back(bucket, charge) end
  buckets[i], charges[i], fits[i] = bucket, charge, weigh(bucket, charge)
  if charge.binding and not fits[i] then admitted = false end
  if charge.last then
    for n = first, i do
      local taken = charges[n]
      if admitted and fits[n] and taken.takes and taken.verb == 's' then
        add(buckets[n], taken, taken, 5, ASKED_FIELDS)
        if taken.lease then take_more(buckets[n], taken) end
      end
    end
    first, admitted = i + 1, true
  end
end

-- Without memory nothing is written at all, and those that took nothing can still be told. Any other error goes to everybody.
for key, bucket in pairs(opened) do
  local failure = bucket.changed and write(key, bucket)
  if failure then
    if not failure.err:find('OOM', 1, true) then return failure end
    reply[UNWRITTEN] = 1
  end
end
return reply
