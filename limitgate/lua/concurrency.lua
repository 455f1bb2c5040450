-- Requests in flight. Twin of limitgate/algorithms/concurrency.py.
--
-- In a bucket: where it is on its timeline, and the places that are taken, as one text, in the order in which they end: for each the
-- name of its slot and until when it lasts, on that timeline. So that nothing is counted twice, a slot of several places is there
-- several times. Asked: how many may be taken, how many are to be, and for how long. To be put right: what is given back, or renewed
-- where it is negative, and the name. Reported: how many are taken, for how long the last one lasts, the name that was asked for if
-- it has a slot, and of how many places.

local AT, PLACES = FIRST, FIRST + 1
local PLACE, NAME, SIZE, NAME_SIZE = '<I7I7', '<I7', 14, 7
local MOST, COST, HELD = 1, 2, 3
local LONGEST, FOR_EVER = 60000000, 2^52

local function until_when(places, at)
  local _, moment = unpack(PLACE, places, at)
  return moment
end

-- For how long the first and the last place last.
local function span(bucket)
  local places = bucket[PLACES]
  if #places == 0 then return 0, 0 end
  return until_when(places, 1) - bucket[AT], until_when(places, #places - SIZE + 1) - bucket[AT]
end

local function left(bucket)
  local _, last = span(bucket)
  return math.max(0, math.min(last, LONGEST))
end

-- Where the places of a slot begin, and their number.
local function find(places, name)
  local wanted = pack(NAME, name)
  local at = places:find(wanted, 1, true)
  while at and at % SIZE ~= 1 do at = places:find(wanted, at + 1, true) end
  if not at then return 1, 0 end
  local number = 1
  while places:sub(at + number * SIZE, at + number * SIZE + NAME_SIZE - 1) == wanted do number = number + 1 end
  return at, number
end

local function without(places, at, number)
  if number == 0 then return places end
  return places:sub(1, at - 1) .. places:sub(at + number * SIZE)
end

-- Take a slot, or renew it, with as many places as it has.
local function take(bucket, charge, name, number)
  local places = bucket[PLACES]
  local at, own = find(places, name)
  local place = pack(PLACE, name, bucket[AT] + charge[HELD])
  bucket[PLACES] = without(places, at, own) .. place:rep(own > 0 and own or number)
end

local function begin(bucket)
  if not bucket[PLACES] or bucket[PLACES] == '' then bucket[AT], bucket[PLACES] = 0, '' end
end

return {
  asked = 'ddd',
  leased = 'dd',
  layout = function(size)
    local places = size - NAME_SIZE
    return places > 0 and places % SIZE == 0 and 'I7c' .. places
  end,
  forward = function(bucket, elapsed)
    local places, over = bucket[PLACES], 0
    local first, last = span(bucket)
    if bucket[AT] > FOR_EVER or first > last or last > LONGEST then
      bucket[AT], bucket[PLACES] = 0, ''
      return true
    end
    bucket[AT] = bucket[AT] + elapsed
    while over < #places and until_when(places, over + 1) <= bucket[AT] do over = over + SIZE end
    bucket[PLACES] = places:sub(over + 1)
  end,
  weigh = function(bucket, charge)
    begin(bucket)
    local taken, n = #bucket[PLACES] / SIZE, #reply
    local _, own = find(bucket[PLACES], charge.slot or 0)
    reply[n + 1], reply[n + 2] = taken, left(bucket)
    reply[n + 3], reply[n + 4] = own > 0 and charge.slot or 0, own
    return own > 0 or taken + charge[COST] <= charge[MOST]
  end,
  take = function(bucket, charge)
    take(bucket, charge, charge.slot or 0, charge[COST])
  end,
  clear = function(bucket, charge)
    bucket[AT], bucket[PLACES] = 0, ''
  end,
  put_right = function(bucket, charge)
    begin(bucket)
    local back, name, places = charge.lease[1], charge.lease[2], bucket[PLACES]
    local at, own = find(places, name)
    if back > 0 then
      bucket[PLACES] = without(places, at, own)
    elseif back < 0 and (own > 0 or #places / SIZE - back <= charge[MOST]) then
      take(bucket, charge, name, -back)
    end
  end,
  close = function(bucket)
    local places = bucket[PLACES]
    if places and places ~= '' then return 'I7', AT, left(bucket), places end
  end,
}
