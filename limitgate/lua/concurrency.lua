-- Requests in flight. Twin of limitgate/algorithms/concurrency.py. The part after PLAIN is for plain.lua and
-- refund.lua and repeats check, commit and apply_adjustment for short buckets. There the grace of a refund is the
-- slot name, and the last ARGV holds the names of the taken slots.
--
-- Bucket: its time on a private timeline, and the taken places in order of expiry, each with slot name and end
-- time. A slot of several places is stored that many times in a row. The stored text of a long bucket is not copied
-- per charge: the bucket records removed ranges and a list of new slots. If only a small part at the front is gone,
-- new slots are appended to the stored text. Charge: maximum places, requested places, duration. Adjustment: places
-- to return (negative: to renew), and the slot name. Reported: taken places, remaining time of the last one, the
-- requested name if it has a slot, and its places.

local AT = FIRST
local PLACE, NAME, SIZE, NAME_SIZE, HEAD = '<I7I7', '<I7', 14, 7, HEADER_SIZE + 7
local MOST, COST, HELD = 1, 2, 3
local LONGEST, FOR_EVER = 60000000, 2^52
-- New slots are appended to a stored text of at least this many bytes.
local LONG = 2048
-- The text is copied if more than one place in SHARE is unused.
local SHARE = 8

local function until_when(text, at)
  local _, moment = unpack(PLACE, text, at)
  return moment
end

-- Use the places of a text from an offset on, and no others.
local function hold(bucket, text, from)
  bucket.text, bucket.from, bucket.over = text, from, #text + 1
  bucket.taken = (bucket.over - from) / SIZE
  -- Removed ranges: start -> end, and -end -> start.
  bucket.gone = {}
  -- New slots as {number, text}, in order and by name.
  bucket.slots, bucket.named = {}, {}
end

local function begin(bucket)
  if not bucket.taken or bucket.taken == 0 then
    bucket[AT] = 0
    hold(bucket, '', 1)
  end
end

-- Remaining time of the last place.
local function left(bucket)
  if bucket.taken == 0 then return 0 end
  local slots = bucket.slots
  while slots[#slots] and not slots[#slots].number do slots[#slots] = nil end
  local text, at = bucket.text, bucket.over - SIZE
  if #slots > 0 then text, at = slots[#slots].text, 1 end
  return math.max(0, math.min(until_when(text, at) - bucket[AT], LONGEST))
end

-- Offset of a slot in the text, and its number of places.
local function find(bucket, name)
  local wanted, text = pack(NAME, name), bucket.text
  local at = text:find(wanted, bucket.from, true)
  while at and (at - HEAD) % SIZE ~= 1 do at = text:find(wanted, at + 1, true) end
  if not at or bucket.gone[at] then return 1, 0 end
  local number = 1
  while text:sub(at + number * SIZE, at + number * SIZE + NAME_SIZE - 1) == wanted do number = number + 1 end
  return at, number
end

-- Number of places of a slot. The name 0 is never used.
local function places(bucket, name)
  if name == 0 then return 0 end
  local slot = bucket.named[name]
  if slot then return slot.number end
  local _, number = find(bucket, name)
  return number
end

-- Remove a slot. Return its number of places.
local function remove(bucket, name)
  local slot, gone = bucket.named[name], bucket.gone
  local number = slot and slot.number
  if slot then
    slot.number, bucket.named[name] = nil, nil
  else
    local at
    at, number = find(bucket, name)
    if number == 0 then return 0 end
    local stop = at + number * SIZE
    gone[at], gone[-stop] = stop, at
    while gone[-bucket.over] do bucket.over = gone[-bucket.over] end
  end
  bucket.taken = bucket.taken - number
  return number
end

-- Take a slot, or renew it with its current number of places.
local function take(bucket, charge, name, number)
  local own = remove(bucket, name)
  if own > 0 then number = own end
  local slot = {number = number, text = pack(PLACE, name, bucket[AT] + charge[HELD]):rep(number)}
  bucket.slots[#bucket.slots + 1], bucket.named[name], bucket.taken = slot, slot, bucket.taken + number
end

-- The text of the new slots.
local function appended(bucket)
  local texts = {}
  for _, slot in ipairs(bucket.slots) do
    if slot.number then texts[#texts + 1] = slot.text end
  end
  return table.concat(texts)
end

-- The stored text without the removed ranges.
local function rest_of_text(bucket)
  local begins, texts, from = {}, {}, bucket.from
  for at in pairs(bucket.gone) do
    if at > 0 then begins[#begins + 1] = at end
  end
  table.sort(begins)
  for _, at in ipairs(begins) do
    texts[#texts + 1] = bucket.text:sub(from, at - 1)
    from = bucket.gone[at]
  end
  texts[#texts + 1] = bucket.text:sub(from)
  return table.concat(texts)
end

return {
  charge_format = 'ddd',
  adjustment_format = 'dd',
  layout = function(size)
    local all = size - NAME_SIZE
    return all > 0 and all % SIZE == 0 and 'I7'
  end,
  advance = function(bucket, elapsed, charge, text)
    local low, high = 1, (#text - HEAD) / SIZE + 1
    local first, last = until_when(text, HEAD + 1), until_when(text, #text - SIZE + 1)
    if bucket[AT] > FOR_EVER or first > last or last - bucket[AT] > LONGEST then return true end
    bucket[AT] = bucket[AT] + elapsed
    if first > bucket[AT] then high = 1 elseif last <= bucket[AT] then low = high end
    while low < high do
      local middle = floor((low + high) / 2)
      if until_when(text, HEAD + (middle - 1) * SIZE + 1) > bucket[AT] then high = middle else low = middle + 1 end
    end
    hold(bucket, text, HEAD + (low - 1) * SIZE + 1)
  end,
  check = function(bucket, charge)
    begin(bucket)
    local taken, n = bucket.taken, #reply
    local own = places(bucket, charge.slot or 0)
    reply[n + 1], reply[n + 2] = taken, left(bucket)
    reply[n + 3], reply[n + 4] = own > 0 and charge.slot or 0, own
    return own > 0 or taken + charge[COST] <= charge[MOST]
  end,
  commit = function(bucket, charge)
    take(bucket, charge, charge.slot or 0, charge[COST])
  end,
  reset = function(bucket)
    bucket.taken = nil
  end,
  apply_adjustment = function(bucket, charge)
    begin(bucket)
    local back, name = charge.adjustment[1], charge.adjustment[2]
    if back > 0 then
      remove(bucket, name)
    elseif back < 0 and (bucket.taken - back <= charge[MOST] or places(bucket, name) > 0) then
      take(bucket, charge, name, -back)
    end
  end,
  encode = function(bucket)
    if not bucket.taken or bucket.taken == 0 then return end
    local size = #bucket.text - HEAD
    if size > LONG and not next(bucket.gone) and (bucket.from - HEAD) * SHARE <= size then
      return 'I7', AT, left(bucket), appended(bucket), size
    end
    return 'I7', AT, left(bucket), rest_of_text(bucket) .. appended(bucket)
  end,
}

--PLAIN
--names
local most$w, cost$w, held$w --window
local function left$b(at, text)
  local _, last = unpack('<I7I7', text, #text - 13)
  return math.max(0, math.min(last - at, 60000000))
end
local function opened$b(value)
  if not value then return 0, '', 0 end
  if #value < 29 or #value > 2063 or (#value - 15) % 14 ~= 0 then return end
  local version, written, at = unpack('<BI7I7', value)
  local _, over = unpack('<I7I7', value, 16)
  local _, last = unpack('<I7I7', value, #value - 13)
  if version ~= VERSION or now < written or at > MAX_OWED or over > last or last - at > 60000000 then return end
  local from = 16
  at = at + now - written
  while over <= at do
    from = from + 14
    if from > #value then return 0, '', 0 end
    _, over = unpack('<I7I7', value, from)
  end
  local text = value:sub(from)
  return at, text, left$b(at, text)
end
--asked
most$w, cost$w, held$w, place = unpack('<ddd', text, place) --window
--read
local at$b, text$b, lasts$b = opened$b(value)
--charge
local name$b = pack('<I7', unpack('<d', ARGV[#ARGV], 8 * (first - 1) / $buckets + 1))
if not at$b or text$b:find(name$b, 1, true) then is_known, at$b, text$b, lasts$b = false, 0, '', 0 end
reply[size + $r], reply[size + ($r + 1)], reply[size + ($r + 2)], reply[size + ($r + 3)] = #text$b / 14, lasts$b, 0, 0 --window
if #text$b / 14 + cost$w > most$w then fits$b = false end --window
lasts$b = held$w --window
local new$b = (name$b .. pack('<I7', at$b + lasts$b)):rep(cost$w) --window
--value
value, lifetime = pack('<BI7I7', VERSION, now, at$b) .. text$b .. new$b, lasts$b
--refund
local new$b = ''
if not at$b then
  is_known = false
else
  local name = pack('<I7', grace$w) --window
  local from = text$b:find(name, 1, true)
  while from and from % 14 ~= 1 do from = text$b:find(name, from + 1, true) end
  if from then
    local to = from + 14
    while text$b:sub(to, to + 6) == name do to = to + 14 end
    text$b = text$b:sub(1, from - 1) .. text$b:sub(to)
  end
  lasts$b = text$b == '' and 0 or left$b(at$b, text$b)
end
