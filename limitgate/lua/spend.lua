-- Charges all buckets of a request or none, and reports what each owed before. Twin of limitgate/stores/memory.py.
--
-- KEYS      the buckets.
-- ARGV[1]   'spend', 'peek' (charge nothing) or 'reset' (the asked windows start full).
-- ARGV[i+1] the charge of KEYS[i], packed: one byte, 1 if this bucket may refuse the request, then for each window
--           its id, count, tolerance and increment.
-- Reply     {now, unreadable values, clock steps, debt, debt, ...}.
--
-- An amount of time is two numbers: whole microseconds and a rest over count, both exact in doubles. A bucket is one
-- string: version, time of writing in Unix µs, then per window its id, count and debt.

local ASKED, ASKED_SIZE = '<dddddd', 48
local HEADER, FIRST, VERSION = '<BI7', 9, 1
local WINDOW, WINDOW_SIZE = '<I6I6I7I6', 25
local MAX_OWED = 2^52
local floor, pack, unpack = math.floor, struct.pack, struct.unpack

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply = {now, 0, 0}
local UNREADABLE, STEPS = 2, 3

-- The debt (whole, rest over old) as (whole, rest over new): the same number of requests under another count.
-- Exact long multiplication, bit by bit, since whole * old does not fit a double.
local function rescale(whole, rest, old, new)
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

-- A bucket's value and when it was written. A value that is not ours is removed and counted.
local function read(key)
  local value = redis.pcall('GET', key)
  if not value then return '', now end
  if type(value) == 'string' and #value >= FIRST and (#value - FIRST + 1) % WINDOW_SIZE == 0 then
    local version, written = unpack(HEADER, value)
    if version == VERSION then return value, written end
  end
  redis.call('DEL', key)
  reply[UNREADABLE] = reply[UNREADABLE] + 1
  return '', now
end

-- The window standing at a place of a bucket's value: its id, count and debt; nothing if it makes no sense.
local broken
local function window(value, place)
  local id, count, whole, rest = unpack(WINDOW, value, place)
  if rest < count and whole <= MAX_OWED then return id, count, whole, rest end
  broken = true
end

-- The count and debt of a window in a bucket's value, nothing if it has none. It mostly stands where expected.
local function find(value, id, expected)
  if expected < #value then
    local held, count, whole, rest = window(value, expected)
    if held == id then return count, whole, rest end
  end
  for place = FIRST, #value, WINDOW_SIZE do
    local held, count, whole, rest = window(value, place)
    if held == id then return count, whole, rest end
  end
end

-- The windows of a value that a charge does not ask about, packed as they stand now.
local function others(value, charge, elapsed)
  local asked, kept = {}, ''
  for at = 2, #charge, ASKED_SIZE do asked[unpack('<d', charge, at)] = true end
  for place = FIRST, #value, WINDOW_SIZE do
    local id, count, whole, rest = window(value, place)
    if id and not asked[id] and whole >= elapsed then
      kept = kept .. pack(WINDOW, id, count, whole - elapsed, rest)
    end
  end
  return kept
end

-- The asked windows as they are reported from a place of the reply on, packed.
local function unchanged(charge, reported)
  local state = ''
  for at = 2, #charge, ASKED_SIZE do
    local id, count = unpack('<dd', charge, at)
    state = state .. pack(WINDOW, id, count, reply[reported + 1], reply[reported + 2])
    reported = reported + 2
  end
  return state
end

-- Microseconds until none of some packed windows owes anything, rounded up.
local function drained_in(windows)
  local longest = 0
  for place = 1, #windows, WINDOW_SIZE do
    local _, _, whole, rest = unpack(WINDOW, windows, place)
    if rest > 0 then whole = whole + 1 end
    if whole > longest then longest = whole end
  end
  return longest
end

-- First every bucket is read and reported, then all are written. One whose time of writing lies in the future, or whose
-- debt was left by another count or makes no sense, is stale: it is written anew even if nothing is taken, so that what is promised now holds.

local buckets = {}
local admitted = true

for i, key in ipairs(KEYS) do
  local charge = ARGV[i + 1]
  local value, written = read(key)
  local elapsed = now - written
  local stepped = elapsed < 0
  if stepped then elapsed, reply[STEPS] = 0, reply[STEPS] + 1 end
  local after, fits, takes, stale = '', true, false, stepped
  local expected, found, reported = FIRST, 0, #reply
  broken = false
  for at = 2, #charge, ASKED_SIZE do
    local id, count, tolerance, tolerance_rest, increment, increment_rest = unpack(ASKED, charge, at)
    local old, whole, rest = find(value, id, expected)
    if old then
      found = found + 1
      whole = whole - elapsed
      if whole < 0 or (whole == 0 and rest == 0) then
        whole, rest = 0, 0
      elseif old ~= count then
        whole, rest = rescale(whole, rest, old, count)
        stale = true
      end
    else
      whole, rest = 0, 0
    end
    expected = expected + WINDOW_SIZE
    local n = #reply
    reply[n + 1], reply[n + 2] = whole, rest
    if increment > 0 or increment_rest > 0 then
      takes = true
      whole, rest = whole + increment, rest + increment_rest
      if rest >= count then whole, rest = whole + 1, rest - count end
      if whole > tolerance or (whole == tolerance and rest > tolerance_rest) then fits = false end
    end
    after = after .. pack(WINDOW, id, count, whole, rest)
  end
  if broken then stale, reply[UNREADABLE] = true, reply[UNREADABLE] + 1 end
  if not fits and string.byte(charge) == 1 then admitted = false end
  local kept = FIRST + found * WINDOW_SIZE <= #value
  buckets[i] = {after, fits and takes, stale, reported, value, elapsed, kept}
end

for i, key in ipairs(KEYS) do
  local after, takes, stale, reported, value, elapsed, kept = _G.unpack(buckets[i])
  local state
  if ARGV[1] == 'reset' then
    state = ''
  elseif ARGV[1] == 'spend' and admitted and takes then
    state = after
  elseif stale then
    state = unchanged(ARGV[i + 1], reported)
  end
  if state then
    if kept then state = state .. others(value, ARGV[i + 1], elapsed) end
    local lifetime = drained_in(state)
    if lifetime == 0 then
      redis.call('DEL', key)
    else
      redis.call('SET', key, pack(HEADER, VERSION, now) .. state, 'PX', floor(lifetime / 1000) + 2)
    end
  end
end

if ARGV[1] == 'reset' then
  for i = 4, #reply do reply[i] = 0 end
end
return reply
