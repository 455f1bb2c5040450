-- Reservations that are given back unless they are settled or renewed in time. Twin of limitgate/algorithms/holds.py.
--
-- Bucket: its own clock in µs, which never goes back; by that clock, when no entry is needed any more, a time before
-- which none expires, and when none is barred any more; the numbers of entries and of places, the first free place; and
-- the places, all of one size. A place has name, deadline, and for each of the charges that follow in the plan the time
-- of the charge and the adjustment that refunds it, zeros if there is none; a free one has no name, and the next free
-- place. So most calls read and write a single place. Charge: the number of charges that follow. Adjustment: action,
-- name, time to the deadline, time in which the charges drain, latest time to add the entry or to bar it, and its place if known.
-- Reported: number of entries, 1 if the action found, added or barred its entry, and its place.

local CLOCK, NEEDED, EARLIEST, BARRED, COUNT, PLACES, FREE = FIRST, FIRST + 1, FIRST + 2, FIRST + 3, FIRST + 4, FIRST + 5, FIRST + 6
local LAYOUT, HEAD = 'I7I7I7I7I4I4I4', HEADER_SIZE + 40
local NAME, ENTRY, SIZE = '<I7', '<I7I7', 14
local REGISTER, RELEASE, RENEW, UNDO = 1, 2, 3, 4
local MAX_ENTRIES, MAX_REFUNDS, MAX_WORK, BARRED_US = 5000, 20000, 100, 60000000
-- The places are copied if more than half of them, and this many, are free.
local MANY = 64

local function begin(bucket)
  bucket[CLOCK], bucket[NEEDED], bucket[EARLIEST], bucket[BARRED] = bucket[CLOCK] or now, now, now, 0
  bucket[COUNT], bucket[PLACES], bucket[FREE] = 0, 0, 0
  bucket.is_stored, bucket.text, bucket.edits = false, '', {}
end

-- Set the sizes of an entry for these charges, and how many entries fit.
local function measure(bucket, others)
  local size, windows, work = SIZE, 0, 0
  for _, other in ipairs(others) do
    local charge = other.charge
    windows, size = windows + charge.windows, size + 8 + 8 * charge.windows * #charge.kind.adjustment_format
    work = work + (charge.kind.remembers_turns and 10 + floor(charge[1] / 10) or charge.windows)
  end
  bucket.size, bucket.work = size, work
  bucket.most = math.min(MAX_ENTRIES, floor(MAX_REFUNDS / windows))
end

-- The stored places, as a text.
local function stored(bucket)
  bucket.text = bucket.text or redis.call('GETRANGE', bucket.key, HEAD, -1)
  return bucket.text
end

-- The text of a place.
local function content(bucket, place)
  local edit, from = bucket.edits[place], (place - 1) * bucket.size
  if edit then return edit end
  if bucket.text then return bucket.text:sub(from + 1, from + bucket.size) end
  return redis.call('GETRANGE', bucket.key, HEAD + from, HEAD + from + bucket.size - 1)
end

-- Place of an entry; nothing if it is gone.
local function find(bucket, name, expected)
  if expected > 0 and expected <= bucket[PLACES] and unpack(NAME, content(bucket, expected)) == name then return expected end
  for place, text in pairs(bucket.edits) do
    if unpack(NAME, text) == name then return place end
  end
  local wanted, text, size = pack(NAME, name), stored(bucket), bucket.size
  local at = text:find(wanted, 1, true)
  while at and ((at - 1) % size ~= 0 or bucket.edits[(at - 1) / size + 1]) do at = text:find(wanted, at + 1, true) end
  return at and (at - 1) / size + 1
end

local function remove(bucket, place)
  bucket.edits[place] = pack(ENTRY, 0, bucket[FREE]) .. ('\0'):rep(bucket.size - SIZE)
  bucket[FREE], bucket[COUNT], bucket.changed = place, bucket[COUNT] - 1, true
end

-- Write an entry to a place.
local function put(bucket, place, name, duration, refunds, needed)
  local till = bucket[CLOCK] + duration
  bucket.edits[place] = pack(ENTRY, name, till) .. refunds
  bucket[NEEDED] = math.max(bucket[NEEDED], bucket[CLOCK] + math.max(duration, needed))
  bucket[EARLIEST] = bucket[COUNT] > 0 and math.min(bucket[EARLIEST], till) or till
  bucket.changed = true
end

-- Add an entry. Return its place.
local function add(bucket, name, duration, refunds, needed)
  local place = bucket[FREE]
  if place > 0 then
    local _, free = unpack(ENTRY, content(bucket, place))
    bucket[FREE] = free
  else
    place = bucket[PLACES] + 1
    bucket[PLACES] = place
  end
  put(bucket, place, name, duration, refunds, needed)
  bucket[COUNT] = bucket[COUNT] + 1
  return place
end

-- What refunds the charges, as a text.
local function packed(others)
  local texts = {}
  for n, other in ipairs(others) do
    local charge, fields = other.charge, other.charge.windows * #other.charge.kind.adjustment_format
    texts[n] = charge.adjustment and pack('<d' .. ('d'):rep(fields), charge.as_of, values(charge.adjustment))
      or ('\0'):rep(8 + 8 * fields)
  end
  return table.concat(texts)
end

-- Refund the charges of an entry.
local function give_back(text, others)
  local at = SIZE + 1
  for _, other in ipairs(others) do
    local charge, adjustment, as_of = other.charge, other.charge.adjustment, other.charge.as_of
    local fields = charge.windows * #charge.kind.adjustment_format
    charge.as_of = unpack('<d', text, at)
    if charge.as_of > 0 then
      charge.adjustment = unpacked('<' .. ('d'):rep(fields), text, at + 8)
      charge.kind.apply_adjustment(other.bucket, charge)
      other.bucket.changed = true
    end
    charge.adjustment, charge.as_of = adjustment, as_of
    at = at + 8 + 8 * fields
  end
end

-- Copy the entries to the first places.
local function compact(bucket)
  local texts = {}
  for place = 1, bucket[PLACES] do
    local text = content(bucket, place)
    if unpack(NAME, text) > 0 then texts[#texts + 1] = text end
  end
  bucket.text, bucket.edits, bucket.is_stored = table.concat(texts), {}, false
  bucket[PLACES], bucket[FREE] = #texts, 0
end

-- Refund the entries whose deadline has passed, in order, as many as a call may, at least one. If there are many more,
-- the order of their places is good enough.
local function give_back_expired(bucket, others)
  if bucket[COUNT] == 0 or bucket[EARLIEST] > bucket[CLOCK] then return end
  local text, size, edits, expired, earliest = stored(bucket), bucket.size, bucket.edits, {}, nil
  for place = 1, bucket[PLACES] do
    local edit = edits[place]
    local name, till = unpack(ENTRY, edit or text, edit and 1 or (place - 1) * size + 1)
    if name > 0 then
      if till <= bucket[CLOCK] then expired[#expired + 1] = {name = name, till = till, place = place} end
      if till > bucket[CLOCK] and till < (earliest or till + 1) then earliest = till end
    end
  end
  if #expired <= MAX_WORK then
    table.sort(expired, function(a, b) return a.till < b.till or (a.till == b.till and a.name < b.name) end)
  end
  for _, entry in ipairs(expired) do
    local done = bucket.done or 0
    if done > 0 and done + bucket.work > MAX_WORK then
      earliest = entry.till
      break
    end
    give_back(content(bucket, entry.place), others)
    remove(bucket, entry.place)
    bucket.done = done + bucket.work
  end
  bucket[EARLIEST], bucket.changed = earliest or bucket[CLOCK], true
  if bucket[PLACES] > 2 * bucket[COUNT] + MANY then compact(bucket) end
end

return {
  charge_format = 'd',
  adjustment_format = 'dddddd',
  first = HEAD,
  layout = function(size) return size >= 40 and LAYOUT end,
  advance = function(bucket, elapsed, charge, text, key)
    local is_broken = bucket[CLOCK] > MAX_OWED or bucket[COUNT] < 1 or bucket[COUNT] > bucket[PLACES]
    if is_broken or bucket[FREE] > bucket[PLACES] then
      bucket[CLOCK] = nil
      return true
    end
    bucket[CLOCK] = bucket[CLOCK] + elapsed
    bucket.is_stored, bucket.edits = true, {}
  end,
  -- Give back what has expired, then carry out the action. Return true if the plan must adjust nothing.
  carry_out = function(bucket, charge, others, key)
    bucket.key, bucket.found, bucket.place = key, 0, 0
    measure(bucket, others)
    if bucket.is_stored and redis.call('STRLEN', key) ~= HEAD + bucket[PLACES] * bucket.size and not next(bucket.edits) then
      bucket[CLOCK], bucket.changed, reply[UNREADABLE] = nil, true, reply[UNREADABLE] + 1
    end
    if not bucket[CLOCK] then begin(bucket) end
    give_back_expired(bucket, others)
    if not charge.adjustment then return false end
    local action, name, duration, needed, latest, expected = values(charge.adjustment, 1, 6)
    if action == REGISTER then
      local is_barred = bucket[BARRED] > bucket[CLOCK] and find(bucket, name, 0)
      if not is_barred and bucket[COUNT] < bucket.most and now <= latest then
        bucket.found, bucket.place = 1, add(bucket, name, duration, packed(others), needed)
      end
      return true
    end
    local place = find(bucket, name, expected)
    if place then
      bucket.found, bucket.place = 1, place
      if action == RENEW then
        put(bucket, place, name, duration, content(bucket, place):sub(SIZE + 1), duration)
      else
        remove(bucket, place)
      end
    elseif action == UNDO and bucket[COUNT] < bucket.most and now < latest then
      bucket[BARRED], bucket.found = bucket[CLOCK] + BARRED_US, 1
      add(bucket, name, BARRED_US, ('\0'):rep(bucket.size - SIZE), BARRED_US)
    else
      return true
    end
    return false
  end,
  check = function(bucket)
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = bucket[COUNT], bucket.found, bucket.place
    return true
  end,
  reset = begin,
  apply_adjustment = function() end,
  encode = function(bucket)
    if not bucket[CLOCK] or bucket[COUNT] == 0 then return end
    local lifetime, pieces, places = math.max(0, bucket[NEEDED] - bucket[CLOCK]), {}, bucket[PLACES]
    if bucket.is_stored then
      for place, text in pairs(bucket.edits) do pieces[#pieces + 1] = {HEAD + (place - 1) * bucket.size, text} end
      return LAYOUT, FREE, lifetime, pieces, places * bucket.size
    end
    for place = 1, places do pieces[place] = content(bucket, place) end
    return LAYOUT, FREE, lifetime, table.concat(pieces)
  end,
}
