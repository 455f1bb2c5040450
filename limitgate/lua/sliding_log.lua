-- Sliding log. Twin of limitgate/algorithms/sliding_log.py.
--
-- In a bucket: its own clock in µs, which only goes forward, how many requests there had been before the first entry, and the
-- entries, oldest first, as one string: for each when it was made by that clock, and how many requests there have been up to it.
-- Entries are all of one size and in order, so what is looked for among them is found by bisection, and they are never taken apart.
-- Asked: burst, cost, period. To be put right: what is put back, and when by the bucket's clock it was charged.
-- Reported: requests that count, the cost, how long until it fits (-1 for never), until nothing counts any more, and the clock.

local CLOCK, BEFORE, ENTRIES = FIRST, FIRST + 1, FIRST + 2
local BURST, COST, PERIOD = 1, 2, 3
local ENTRY, SIZE = '<I7I6', 13
local MANY = 100
local MAX_USED = 2^32
local WRAP = 2^48  -- totals begin again at 0 there

local function begin(bucket, charge)
  if not bucket[CLOCK] then bucket[CLOCK], bucket[BEFORE], bucket[ENTRIES] = now, 0, '' end
  bucket.period = charge[PERIOD]
end

local function length(bucket)
  return #bucket[ENTRIES] / SIZE
end

-- When an entry was made, and how many requests count up to it. Before the first, no time and no requests.
local function entry(bucket, place)
  if place == 0 then return -1, 0 end
  local time, total = unpack(ENTRY, bucket[ENTRIES], (place - 1) * SIZE + 1)
  return time, (total - bucket[BEFORE]) % WRAP
end

local function used(bucket)
  local _, total = entry(bucket, length(bucket))
  return total
end

-- The first entry that was made after a time, and the first up to which more than so many requests count; one after the last if
-- there is none.
local function search(bucket, time, total)
  local low, high = 1, length(bucket) + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local made, counting = entry(bucket, middle)
    if made > time and counting > total then high = middle else low = middle + 1 end
  end
  return low
end
local function after(bucket, time) return search(bucket, time, -1) end
local function beyond(bucket, total) return search(bucket, -1, total) end

-- The entries from a place to another.
local function part(bucket, from, to)
  return bucket[ENTRIES]:sub((from - 1) * SIZE + 1, to * SIZE)
end

local function packed(bucket, time, total)
  return pack(ENTRY, time, (bucket[BEFORE] + total) % WRAP)
end

-- The entries from a place on, with other totals. Many at a time: it is the one thing that has to look at each of them.
local function shifted(bucket, from, by)
  local entries, last = {}, length(bucket)
  for place = from, last, MANY do
    local some = math.min(MANY, last - place + 1)
    local layout = '<' .. ('I7I6'):rep(some)
    local found = numbers(layout, bucket[ENTRIES], (place - 1) * SIZE + 1)
    for n = 2, 2 * some, 2 do found[n] = (found[n] + by) % WRAP end
    entries[#entries + 1] = pack(layout, values(found))
  end
  return table.concat(entries)
end

-- Remember requests that come now.
local function add(bucket, charge, requests)
  local kept = length(bucket)
  local newest, total = entry(bucket, kept)
  if newest == bucket[CLOCK] or kept >= charge[BURST] then kept = kept - 1 end
  bucket[ENTRIES] = part(bucket, 1, kept) .. packed(bucket, bucket[CLOCK], total + requests)
end

-- Forget requests of a moment, as far as they count; if it has not come yet, the latest.
local function remove(bucket, requests, moment)
  local last, has_come = after(bucket, moment) - 1, moment <= bucket[CLOCK]
  local time, total = entry(bucket, last)
  if last == 0 or requests == 0 or (has_come and time < moment) then return end
  local _, least = entry(bucket, has_come and last - 1 or 0)
  local left = math.max(least, total - requests)
  local first = beyond(bucket, left)
  local made = entry(bucket, first)
  local _, before = entry(bucket, first - 1)
  local own = before < left and packed(bucket, made, left) or ''
  bucket[ENTRIES] = part(bucket, 1, first - 1) .. own .. shifted(bucket, last + 1, left - total)
end

return {
  asked = 'ddd',
  leased = 'dd',
  layout = function(size)
    local entries = size - SIZE
    return entries > 0 and entries % SIZE == 0 and 'I7I6c' .. entries
  end,
  forward = function(bucket, elapsed, charge)
    local newest, counting = entry(bucket, length(bucket))
    if newest > bucket[CLOCK] or bucket[CLOCK] > 2^52 or counting < 1 or counting > MAX_USED then
      bucket[CLOCK] = nil
      return true
    end
    bucket[CLOCK] = bucket[CLOCK] + elapsed
    local long_ago = bucket[CLOCK] - charge[PERIOD]
    local gone = newest <= long_ago and length(bucket) or after(bucket, long_ago) - 1
    if gone > 0 then
      local _, total = entry(bucket, gone)
      bucket[ENTRIES] = part(bucket, gone + 1, length(bucket))
      bucket[BEFORE] = (bucket[BEFORE] + total) % WRAP
    end
  end,
  weigh = function(bucket, charge)
    begin(bucket, charge)
    local newest, count = entry(bucket, length(bucket))
    local cost, wait, refill = charge[COST], 0, 0
    if count > 0 then refill = newest + charge[PERIOD] - bucket[CLOCK] end
    local over = count + cost - charge[BURST]
    if cost > charge[BURST] then
      wait = -1
    elseif over > 0 and cost > 0 then
      wait = entry(bucket, beyond(bucket, over - 1)) + charge[PERIOD] - bucket[CLOCK]
    end
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] = count, cost, wait, refill, bucket[CLOCK]
    return wait == 0
  end,
  take = function(bucket, charge)
    add(bucket, charge, charge[COST])
  end,
  clear = function(bucket)
    bucket[CLOCK] = nil
  end,
  put_right = function(bucket, charge)
    begin(bucket, charge)
    local back, moment = charge.lease[1], charge.lease[2]
    if back >= 0 then return remove(bucket, back, moment) end
    local on_top = math.min(-back, MAX_USED - used(bucket))
    if on_top > 0 then add(bucket, charge, on_top) end
  end,
  close = function(bucket)
    local count = length(bucket)
    if count > 0 then
      local newest = entry(bucket, count)
      return 'I7I6c' .. #bucket[ENTRIES], ENTRIES, newest + bucket.period - bucket[CLOCK]
    end
  end,
}
