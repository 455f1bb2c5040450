-- Sliding log. Twin of limitgate/algorithms/sliding_log.py.
--
-- Bucket: its own clock in µs, which never goes back; the number of requests before the first counted entry; and
-- the entries, oldest first, each with the time of its requests by that clock (in the future for a booked turn) and
-- the total number of requests up to it. Entries have a fixed size and are sorted, so they are found by bisection.
-- A log of more than a page is read page by page, and new entries are appended to it. Expired entries stay at the
-- front until a copy pays off; places count from the first counted entry. Charge: burst, cost, period. Adjustment:
-- requests to return, and their time by the bucket's clock. Reported: counted requests, cost, time until the turn
-- (-1 for never), time until no entry counts, the clock, and how long all of them still count (a period if there
-- are none).

local CLOCK, BEFORE = FIRST, FIRST + 1
local BURST, COST, PERIOD = 1, 2, 3
local ENTRY, SIZE, HEAD = '<I7I6', 13, HEADER_SIZE + 13
local PAGE = 128
local MANY = 100
-- The log is copied if more than one entry in SHARE is expired.
local SHARE = 8
-- Maximum bytes to copy per call; further copies wait for the next call.
local MOST_COPIED = 2^17
local MAX_USED = 2^32
-- Means the latest requests in a refund.
local LATEST = MAX_OWED
-- Totals wrap to 0 here.
local WRAP = 2^48
local copied = 0

-- Initialize a bucket with this many stored entries. The first ``gone`` of them have expired, those up to ``kept``
-- stay, and ``tail`` is the text of new entries after them.
local function hold(bucket, stored, first_page)
  bucket.stored, bucket.gone, bucket.kept, bucket.tail, bucket.pages = stored, 0, stored, '', {first_page}
end

local function begin(bucket, charge)
  if not bucket[CLOCK] then
    bucket[CLOCK], bucket[BEFORE] = now, 0
    hold(bucket, 0)
  end
  bucket.period = charge[PERIOD]
end

local function length(bucket)
  return bucket.kept - bucket.gone + #bucket.tail / SIZE
end

-- The stored text of a range of entries, counted from the first stored entry.
local function stored(bucket, from, to)
  local head = HEAD + (bucket.ban_size or 0)
  return redis.call('GETRANGE', bucket.key, head + (from - 1) * SIZE, head + to * SIZE - 1)
end

local function page(bucket, number)
  local text = bucket.pages[number]
  if not text then
    text = stored(bucket, (number - 1) * PAGE + 1, number * PAGE)
    bucket.pages[number] = text
  end
  return text
end

-- Time of an entry, and number of counted requests up to it. Place 0 has time -1 and no requests.
local function entry(bucket, place)
  if place == 0 then return -1, 0 end
  local text, at = bucket.tail, place + bucket.gone - 1
  if at < bucket.kept then
    text, at = page(bucket, floor(at / PAGE) + 1), at % PAGE
  else
    at = at - bucket.kept
  end
  local time, total = unpack(ENTRY, text, at * SIZE + 1)
  return time, (total - bucket[BEFORE]) % WRAP
end

local function used(bucket)
  local _, total = entry(bucket, length(bucket))
  return total
end

-- First entry after a time with more than this total; one after the last if there is none. Usually it is near the
-- front.
local function search(bucket, time, total)
  local low, high = 1, length(bucket) + 1
  local function is_before(place)
    local made, counting = entry(bucket, place)
    return made <= time or counting <= total
  end
  if high > PAGE and not is_before(PAGE) then high = PAGE end
  while low < high do
    local middle = floor((low + high) / 2)
    if is_before(middle) then low = middle + 1 else high = middle end
  end
  return low
end
local function after(bucket, time) return search(bucket, time, -1) end
local function beyond(bucket, total) return search(bucket, -1, total) end

-- The text of a range of entries.
local function part(bucket, from, to)
  from, to = from + bucket.gone, to + bucket.gone
  local kept, text = bucket.kept, ''
  if from <= math.min(to, kept) then
    if bucket.stored <= PAGE then
      text = bucket.pages[1]:sub((from - 1) * SIZE + 1, math.min(to, kept) * SIZE)
    else
      text = stored(bucket, from, math.min(to, kept))
    end
  end
  if to <= kept then return text end
  return text .. bucket.tail:sub(math.max(0, from - 1 - kept) * SIZE + 1, (to - kept) * SIZE)
end

-- Replace the entries after a place by a text.
local function follow(bucket, place, text)
  local stay = math.min(place + bucket.gone, bucket.kept)
  bucket.tail = bucket.tail:sub(1, (place + bucket.gone - stay) * SIZE) .. text
  bucket.kept = stay
end

local function packed(bucket, time, total)
  return pack(ENTRY, time, (bucket[BEFORE] + total) % WRAP)
end

-- The text of a range of entries with changed totals. Works in chunks, because this is the only function that
-- visits every entry.
local function shifted(bucket, from, to, by)
  local entries, text = {}, part(bucket, from, to)
  for at = 0, to - from, MANY do
    local some = math.min(MANY, to - from + 1 - at)
    local layout = '<' .. ('I7I6'):rep(some)
    local list = unpacked(layout, text, at * SIZE + 1)
    for n = 2, 2 * some, 2 do list[n] = (list[n] + by) % WRAP end
    entries[#entries + 1] = pack(layout, values(list))
  end
  return table.concat(entries)
end

-- Append requests at a moment, with a maximum number of entries.
local function add(bucket, requests, moment, most)
  local kept = length(bucket)
  local newest, total = entry(bucket, kept)
  moment = math.max(moment, newest)
  if newest == moment or kept >= most then kept = kept - 1 end
  follow(bucket, kept, packed(bucket, moment, total + requests))
end

-- Remove requests of a moment, or the latest ones, if they still count. Booked turns stay if others are queued
-- behind them. Lowers the later totals or raises the earlier ones, whichever are fewer.
local function remove(bucket, requests, moment)
  local last, newest = after(bucket, moment == LATEST and bucket[CLOCK] or moment) - 1, length(bucket)
  local time, total = entry(bucket, last)
  if last == 0 or requests == 0 or time < moment and moment < LATEST then return end
  if time > bucket[CLOCK] and last < newest then return end
  local _, least = entry(bucket, moment == LATEST and 0 or last - 1)
  local left = math.max(least, total - requests)
  local first = beyond(bucket, left)
  local made = entry(bucket, first)
  local _, before = entry(bucket, first - 1)
  local kept, earlier, later = first - 1, '', nil
  if newest - last < first then
    later = shifted(bucket, last + 1, newest, left - total)
  else
    earlier, later, kept = shifted(bucket, 1, kept, total - left), part(bucket, last + 1, newest), 0
    bucket[BEFORE] = (bucket[BEFORE] + total - left) % WRAP
    -- Raised above the totals of the expired entries in front.
    bucket.is_raised = true
  end
  local own = before < left and packed(bucket, made, left) or ''
  follow(bucket, kept, earlier .. own .. later)
end

-- Time until the turn of a charge: until enough requests expire and all booked turns have come.
local function wait(bucket, charge)
  if charge[COST] == 0 then return 0 end
  local newest, count = entry(bucket, length(bucket))
  local over, turn = count + charge[COST] - charge[BURST], math.max(newest, bucket[CLOCK])
  if over > 0 then turn = math.max(turn, entry(bucket, beyond(bucket, over - 1)) + charge[PERIOD]) end
  return turn - bucket[CLOCK]
end

-- True if the stored text can stay, with the tail after it. Redis cannot shorten a text.
local function can_stay(bucket, count)
  if bucket.stored <= PAGE or bucket.is_raised or bucket.gone + count < bucket.stored then return false end
  if bucket.gone * SHARE <= bucket.stored then return true end
  copied = copied + count * SIZE
  return copied > count * SIZE and copied > MOST_COPIED
end

return {
  charge_format = 'ddd',
  adjustment_format = 'dd',
  first = HEAD + PAGE * SIZE,
  layout = function(size) return size > SIZE and size % SIZE == 0 and 'I7I6' end,
  advance = function(bucket, elapsed, charge, text, key)
    local size = #text
    if size == HEAD + PAGE * SIZE then size = redis.call('STRLEN', key) - (bucket.ban_size or 0) end
    bucket.key = key
    hold(bucket, (size - HEAD) / SIZE, text:sub(HEAD + 1))
    local clock, last = bucket[CLOCK], bucket.stored
    bucket[CLOCK] = nil
    if last ~= floor(last) or clock > 2^52 then return true end
    local newest, counting = entry(bucket, last)
    if newest > clock + MAX_AHEAD or counting < 1 or counting > MAX_USED then return true end
    bucket[CLOCK] = clock + elapsed
    local long_ago = bucket[CLOCK] - charge[PERIOD]
    local gone = newest <= long_ago and last or after(bucket, long_ago) - 1
    if gone > 0 then
      local _, total = entry(bucket, gone)
      bucket.gone, bucket[BEFORE] = gone, (bucket[BEFORE] + total) % WRAP
    end
  end,
  check = function(bucket, charge)
    begin(bucket, charge)
    local newest, count = entry(bucket, length(bucket))
    local refill, steady = 0, charge[PERIOD]
    if count > 0 then
      refill = newest + charge[PERIOD] - bucket[CLOCK]
      steady = entry(bucket, 1) + charge[PERIOD] - bucket[CLOCK]
    end
    local turn = charge[COST] > charge[BURST] and -1 or wait(bucket, charge)
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = count, charge[COST], turn
    reply[n + 4], reply[n + 5], reply[n + 6] = refill, bucket[CLOCK], steady
    return turn >= 0 and turn <= charge.max_wait
  end,
  remembers_turns = true,
  wait = wait,
  commit = function(bucket, charge, turn)
    add(bucket, charge[COST], bucket[CLOCK] + turn, math.huge)
  end,
  reset = function(bucket)
    bucket[CLOCK] = nil
  end,
  apply_adjustment = function(bucket, charge)
    begin(bucket, charge)
    local back, moment = charge.adjustment[1], charge.adjustment[2]
    if back >= 0 then return remove(bucket, back, moment) end
    local on_top = math.min(-back, MAX_USED - used(bucket))
    -- Comes after the promised turns.
    if on_top > 0 then add(bucket, on_top, bucket[CLOCK], charge[BURST]) end
  end,
  encode = function(bucket)
    local count = length(bucket)
    if count == 0 then return end
    local lifetime = entry(bucket, count) + bucket.period - bucket[CLOCK]
    if can_stay(bucket, count) then return 'I7I6', BEFORE, lifetime, bucket.tail, bucket.kept * SIZE end
    return 'I7I6', BEFORE, lifetime, part(bucket, 1, count)
  end,
}
