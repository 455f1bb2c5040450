-- A ban. Twin of limitgate/algorithms/ban.py.
--
-- Bucket: remaining time of the ban. Charge: nothing. Adjustment: microseconds, and whether to
-- add them (MORE) or to use them as a minimum.

local LEFT = FIRST
local MORE, MAX = 0, 2^52

return {
  charge_format = '',
  adjustment_format = 'dd',
  layout = function(size) return size == 7 and 'I7' end,
  advance = function(bucket, elapsed) bucket[LEFT] = math.max(0, bucket[LEFT] - elapsed) end,
  check = function(bucket, charge)
    reply[#reply + 1] = bucket[LEFT] or 0
    return (bucket[LEFT] or 0) == 0
  end,
  reset = function(bucket, charge) bucket[LEFT] = 0 end,
  apply_adjustment = function(bucket, charge)
    local back, how, left = charge.adjustment[1], charge.adjustment[2], bucket[LEFT] or 0
    bucket[LEFT] = math.min(how == MORE and left + back or math.max(left, back), MAX)
  end,
  encode = function(bucket)
    if bucket[LEFT] and bucket[LEFT] > 0 then return 'I7', LEFT, bucket[LEFT] end
  end,
}
