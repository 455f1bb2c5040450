-- A register. Twin of limitgate/algorithms/register.py.
--
-- In a bucket: the number that it keeps, in parts. Charge: nothing. Adjustment: how to set it, and the number in parts.

local PARTS, SIZE = 96, 6
local IF_EMPTY = 1
local LIFETIME = 100 * 366 * 86400 * 1000000
local LAYOUT = ('I6'):rep(PARTS)

local function is_empty(bucket)
  for place = FIRST, FIRST + PARTS - 1 do
    if (bucket[place] or 0) > 0 then return false end
  end
  return true
end

local function fill(bucket, numbers, from)
  for place = 0, PARTS - 1 do bucket[FIRST + place] = numbers and numbers[from + place] or 0 end
end

return {
  charge_format = '',
  adjustment_format = ('d'):rep(PARTS + 1),
  layout = function(size) return size == PARTS * SIZE and LAYOUT end,
  advance = function() end,
  check = function(bucket)
    for place = 0, PARTS - 1 do reply[#reply + 1] = bucket[FIRST + place] or 0 end
    return true
  end,
  reset = function(bucket) fill(bucket) end,
  apply_adjustment = function(bucket, charge)
    if charge.adjustment[1] ~= IF_EMPTY or is_empty(bucket) then fill(bucket, charge.adjustment, 2) end
  end,
  encode = function(bucket)
    if not is_empty(bucket) then return LAYOUT, FIRST + PARTS - 1, LIFETIME end
  end,
}
