-- Carries out plans in order, each completely or not at all, and reports the state of each bucket before its plan.
-- Twin of limitgate/stores/memory.py. The algorithms, in separate files, define the contents of buckets.
--
-- KEYS      the buckets, one per charge, plan after plan.
-- ARGV[1]   for each key the number of its charge, 16 bits.
-- ARGV[n+1] charge n, packed: verb, algorithm, 1 if it is enforced or 2 if it is made with the previous charge or not
--           at all, 1 if it has a cost, 1 if it ends its plan, the number of windows, then each window's part of the
--           charge; then, if there is an adjustment, a lease, a slot or a wait: requests to lease, time of the adjusted
--           charge, slot name, maximum wait in µs, and the adjustment of each window.
-- Verbs     's'pend, 'p'eek (charge nothing), 'l'ook (change nothing, so that debts drain as before), 'a'djust (make
--           adjustments, charge nothing), 'r'eset (clear the windows) and 'b'an (refuse all charges for at least this
--           many µs, in the field of requests to lease; 0 lifts the ban).
-- Reply     {now, unreadable values, clock steps, 1 if there was no memory to write, then the reported values of each
--           window, then for each charge with a cost on a banned bucket its place and the remaining ban in µs}.
--
-- A bucket is one string: version, time of writing in Unix µs, and the algorithm's values. It is read once, kept as
-- a list of its current values, and written once at the end if it changed. Algorithms read and write only parts of
-- a long one. Nothing is written before all decisions are made. A banned bucket has another version, and the
-- remaining ban in µs comes before the algorithm's values, if any. So plain.lua declines it, and its debt is
-- preserved.

local VERSION, BANNED = 1, 2
local HEADER, HEADER_SIZE, FIRST = '<BI7', 8, 3
local BAN, BAN_SIZE = '<I7', 7
local CHARGE, CHARGE_SIZE = '<c1BBBBH', 7
local MORE, MORE_SIZE = '<dddd', 32
local MAX_OWED, MAX_AHEAD = 2^52, 2^51
local floor, pack, unpack, values = math.floor, struct.pack, struct.unpack, unpack

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply = {now, 0, 0, 0}
local UNREADABLE, STEPS, UNWRITTEN = 2, 3, 4

-- The values packed in a text at a place, as a list.
local function unpacked(format, text, place)
  local list = {unpack(format, text, place)}
  -- The last value is the offset after reading.
  list[#list] = nil
  return list
end

-- a * b / c, rounded down, and the remainder: exact if the quotient, a and b are below 2^53 and c is below 2^52.
-- Long multiplication bit by bit, because the product does not fit a double.
local function multiplied(a, b, c)
  local quotient, left = 0, 0
  local whole, rest = floor(b / c), b % c
  local bit = 2^52
  while bit >= 1 do
    quotient, left = quotient * 2, left * 2
    if left >= c then quotient, left = quotient + 1, left - c end
    if a >= bit then
      a = a - bit
      quotient, left = quotient + whole, left + rest
      if left >= c then quotient, left = quotient + 1, left - c end
    end
    bit = bit / 2
  end
  return quotient, left
end

-- Convert a debt of (whole, rest over old) µs to (whole, rest over new): the same number of requests under another
-- count.
local function rescaled(whole, rest, old, new)
  local quotient, left = multiplied(whole, old, new)
  left = left + rest
  quotient, left = quotient + floor(left / new), left % new
  if quotient >= MAX_OWED then return MAX_OWED, 0 end
  return quotient, left
end

-- Return an algorithm by its number, created on first use. Each is a table of
--   charge_format, adjustment_format
--                  struct formats of one window's part of a charge, and of an adjustment
--   first          bytes to read at first, if a bucket can be long; else all bytes are read
--   layout         returns the format of a bucket, or of its start, by the number of bytes read; nothing if invalid
--   advance        advances a bucket in time for a charge, given the read text without a ban, and the key; returns true
--                  if a value was invalid
--   check          appends the state of the charge's windows to the reply; returns true if the charge fits
--   commit, reset  charges the windows, given the µs until the turn; clears them
--   wait, remembers_turns
--                  if requests can wait: µs until a charge fits; true if it is charged as of then
--   apply_adjustment
--                  refunds an earlier charge, or charges more even if it does not fit, given also the bucket of the
--                  previous charge
--   carry_out      if the bucket covers the charges that follow in its plan: changes them before they are looked at, given
--                  these with their buckets, and the key; returns true if the plan must make no adjustments
--   encode         returns the format of a bucket, its number of values, its lifetime, a raw text to append (pack would
--                  copy it byte by byte) or a list of offsets and texts to write there, and the number of stored bytes to
--                  keep before that text, nothing to write the whole bucket; returns nothing if the bucket can be deleted
local function make(number)
--ALGORITHMS
end

local made = {}
local function algorithm(number)
  local known = made[number]
  if not known then
    known = make(number)
    made[number] = known
  end
  return known
end

-- Read a bucket and advance it to now; on failure return the error. An unreadable or invalid value is counted, and
-- replaced or deleted at the end. A value that Redis does not let us read is kept.
local function open(key, charge)
  local kind, value = charge.kind, ''
  if kind.first then value = redis.pcall('GETRANGE', key, 0, kind.first - 1) end
  -- GET distinguishes an empty value from none.
  if value == '' then value = redis.pcall('GET', key) end
  if not value then return {VERSION, now, kind = kind} end
  local is_error = type(value) == 'table'
  if is_error and not value.err:find('WRONGTYPE', 1, true) then return nil, value end
  local version, ban = not is_error and string.byte(value), nil
  if version == BANNED and #value >= HEADER_SIZE + BAN_SIZE then
    if kind.first then value = redis.call('GETRANGE', key, 0, kind.first + BAN_SIZE - 1) end
    ban = unpack(BAN, value, HEADER_SIZE + 1)
    value = value:sub(1, HEADER_SIZE) .. value:sub(HEADER_SIZE + BAN_SIZE + 1)
    version = ban <= MAX_OWED and VERSION
  end
  local is_empty = ban and #value == HEADER_SIZE
  local layout = version == VERSION and (is_empty and '' or kind.layout(#value - HEADER_SIZE))
  if not layout then
    reply[UNREADABLE] = reply[UNREADABLE] + 1
    return {VERSION, now, kind = kind, changed = true}
  end
  local bucket = unpacked(HEADER .. layout, value, 1)
  bucket.kind = kind
  local elapsed = now - bucket[2]
  if elapsed < 0 then
    elapsed, reply[STEPS], bucket.changed = 0, reply[STEPS] + 1, true
  end
  if ban then
    bucket.ban_size, bucket.ban = BAN_SIZE, ban > elapsed and ban - elapsed or nil
    if is_empty then return bucket end
  end
  if kind.advance(bucket, elapsed, charge, value, key) then bucket.changed, reply[UNREADABLE] = true, reply[UNREADABLE] + 1 end
  return bucket
end

-- Copy a bucket for a look under limits with another count, while the original drains under its own.
local function copied(bucket)
  local copy = {}
  for place, value in pairs(bucket) do copy[place] = value end
  return copy
end

-- Unpack a charge into a list of its windows' values.
local function decode(text)
  local verb, number, enforced, takes, last, windows = unpack(CHARGE, text)
  local kind = algorithm(number)
  local format = '<' .. kind.charge_format:rep(windows)
  local charge = unpacked(format, text, CHARGE_SIZE + 1)
  charge.kind, charge.verb, charge.enforced, charge.takes, charge.last = kind, verb, enforced == 1, takes == 1, last == 1
  charge.joined = enforced == 2
  charge.most, charge.max_wait, charge.windows = 0, 0, windows
  local place = CHARGE_SIZE + 8 * #charge + 1
  if place < #text then
    charge.most, charge.as_of, charge.slot, charge.max_wait = unpack(MORE, text, place)
    place = place + MORE_SIZE
    if place < #text then charge.adjustment = unpacked('<' .. kind.adjustment_format:rep(windows), text, place) end
  end
  return charge
end

local buckets, charges, fits, bans = {}, {}, {}, {}

-- µs until the turn, over all charges of a plan that can wait; 0 if none of them remembers turns.
local function turn_of(from, to)
  local turn, is_remembered = 0, false
  for n = from, to do
    local charge = charges[n]
    if charge.max_wait > 0 then
      is_remembered = is_remembered or charge.kind.remembers_turns
      if charge.enforced then turn = math.max(turn, charge.kind.wait(buckets[n], charge)) end
    end
  end
  return is_remembered and turn or 0
end

-- Keys of buckets to delete.
local useless = {}

-- Write a bucket with its lifetime, rounded up. Return the error on failure.
local function write(key, bucket)
  local layout, size, lifetime, rest, kept = bucket.kind.encode(bucket)
  local ban, ban_size = bucket.ban, bucket.ban_size or 0
  if not layout and not ban then
    useless[#useless + 1] = key
    return
  end
  bucket[1], bucket[2] = ban and BANNED or VERSION, now
  local head = pack(HEADER .. (layout or ''), values(bucket, 1, layout and size or FIRST - 1))
  -- The text after the head moves.
  if kept and (ban_size > 0) ~= (ban ~= nil) then
    rest, kept = redis.call('GET', key):sub(#head + ban_size + 1, #head + ban_size + kept) .. rest, nil
  end
  if ban then
    head, lifetime = head:sub(1, HEADER_SIZE) .. pack(BAN, ban) .. head:sub(HEADER_SIZE + 1), math.max(lifetime or 0, ban)
  end
  local ttl = floor(lifetime / 1000) + 2
  if not kept then
    local done = redis.pcall('SET', key, rest and head .. rest or head, 'PX', ttl)
    return done.err and done
  end
  local done = redis.pcall('SETRANGE', key, 0, head)
  local pieces = type(rest) == 'table' and rest or {rest ~= '' and {#head + kept, rest} or nil}
  for _, piece in ipairs(pieces) do
    if type(done) == 'number' then done = redis.pcall('SETRANGE', key, piece[1], piece[2]) end
  end
  if type(done) == 'number' then done = redis.pcall('PEXPIRE', key, ttl) end
  return type(done) == 'table' and done
end

-- By key, and by number.
local opened, decoded = {}, {}
local first, admitted, is_left_out = 1, true, false

-- Bucket and charge of a key, and true if the bucket was opened before; on failure the error at the end.
local function at(place)
  local key, number = KEYS[place], unpack('<H', ARGV[1], 2 * place - 1)
  local bucket, charge = opened[key], decoded[number]
  if not charge then
    charge = decode(ARGV[number + 1])
    decoded[number] = charge
  end
  if bucket then return bucket, charge, true end
  local failure
  bucket, failure = open(key, charge)
  opened[key] = bucket
  return bucket, charge, false, failure
end

for i, key in ipairs(KEYS) do
  local bucket, charge, is_read_again, failure = at(i)
  if failure then return failure end
  local kind = charge.kind
  if kind.carry_out then
    local others = {}
    for n = 1, charge[1] do
      local other, following, _, missing = at(i + n)
      if missing then return missing end
      others[n] = {bucket = other, charge = following}
    end
    is_left_out = kind.carry_out(bucket, charge, others, key)
  end
  if charge.verb == 'l' and (is_read_again or not bucket.changed) then bucket = copied(bucket) end
  if charge.verb == 'r' then
    kind.reset(bucket, charge)
    bucket.changed = true
  end
  if charge.adjustment and not is_left_out then
    kind.apply_adjustment(bucket, charge, buckets[i - 1])
    bucket.changed = true
  end
  if charge.verb == 'b' then
    bucket.ban = charge.most > 0 and math.max(bucket.ban or 0, charge.most) or nil
    bucket.changed = true
  end
  buckets[i], charges[i], fits[i] = bucket, charge, kind.check(bucket, charge) or not charge.takes
  if bucket.ban and charge.takes then
    fits[i], bans[#bans + 1], bans[#bans + 2] = false, i, bucket.ban
  end
  if charge.enforced and not fits[i] then admitted = false end
  if charge.last then
    -- A shadow rule is charged in all its buckets or in none.
    for n = i, first, -1 do
      if charges[n].joined then fits[n - 1] = fits[n - 1] and fits[n] end
    end
    for n = first, i do
      if charges[n].joined then fits[n] = fits[n - 1] end
    end
    local turn
    for n = first, i do
      local taken = charges[n]
      if admitted and fits[n] and taken.takes and taken.verb == 's' and taken.kind.commit then
        if taken.max_wait > 0 and not turn then turn = turn_of(first, i) end
        taken.kind.commit(buckets[n], taken, taken.max_wait > 0 and turn or 0)
        buckets[n].changed = true
      end
    end
    first, admitted, is_left_out = i + 1, true, false
  end
end

-- Without memory nothing is written, but plans that charge nothing still get their answer. Any other error fails
-- the call. Buckets are deleted last, because Redis has memory for all commands after the first write of a script.
for key, bucket in pairs(opened) do
  local failure = bucket.changed and write(key, bucket)
  if failure then
    if not failure.err:find('OOM', 1, true) then return failure end
    reply[UNWRITTEN] = 1
  end
end
for _, key in ipairs(useless) do redis.call('DEL', key) end
for _, number in ipairs(bans) do reply[#reply + 1] = number end
return reply
