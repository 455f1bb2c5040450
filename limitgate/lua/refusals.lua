-- Counts refusals. Twin of limitgate/algorithms/refusals.py.
--
-- Bucket: length of the last ban and how long it is remembered, then pairs of remaining time and number of
-- refusals. Charge: nothing. Adjustment: refusals, and the ban that they cause. Reported: length of a new ban. In
-- the plan, the refusing bucket comes directly before this one.

local LAST, KEPT, TIMES_FROM, TIMES = FIRST, FIRST + 1, FIRST + 2, 100
local HEAD, ENTRY = 14, 13

local function layout(size)
  local times = (size - HEAD) / ENTRY
  return times >= 0 and times == floor(times) and 'I7I7' .. ('I7I6'):rep(times)
end

local function clear(bucket)
  for at = #bucket, TIMES_FROM, -1 do bucket[at] = nil end
end

return {
  charge_format = '',
  adjustment_format = 'dddddd',
  layout = layout,
  advance = function(bucket, elapsed)
    bucket[KEPT] = math.max(0, bucket[KEPT] - elapsed)
    if bucket[KEPT] == 0 then bucket[LAST] = 0 end
    local place = TIMES_FROM
    for at = TIMES_FROM, #bucket, 2 do
      local left, number = bucket[at] - elapsed, bucket[at + 1]
      bucket[at], bucket[at + 1] = nil, nil
      if left > 0 then
        bucket[place], bucket[place + 1] = left, number
        place = place + 2
      end
    end
  end,
  check = function(bucket)
    reply[#reply + 1] = bucket.began or 0
    return true
  end,
  reset = function(bucket)
    clear(bucket)
    bucket[LAST], bucket[KEPT] = 0, 0
  end,
  apply_adjustment = function(bucket, charge, refusing)
    if refusing.ban then return end
    local refusals, after, within, first, growing, most = values(charge.adjustment, 1, 6)
    bucket[LAST], bucket[KEPT] = bucket[LAST] or 0, bucket[KEPT] or 0
    local size = #bucket
    if size >= TIMES_FROM and within - bucket[size - 1] < within / TIMES then
      bucket[size] = bucket[size] + refusals
    else
      bucket[size + 1], bucket[size + 2] = within, refusals
    end
    local total = 0
    for at = TIMES_FROM, #bucket, 2 do total = total + bucket[at + 1] end
    if total < after then return end
    clear(bucket)
    local us = math.min(most, math.max(first, floor(bucket[LAST] * growing)))
    bucket[LAST], bucket[KEPT] = 0, 0
    if growing > 1 then bucket[LAST], bucket[KEPT] = us, us + most end
    bucket.began, refusing.ban, refusing.changed = us, us, true
  end,
  encode = function(bucket)
    local size = #bucket
    local lifetime = size >= TIMES_FROM and bucket[size - 1] or 0
    lifetime = math.max(lifetime, bucket[KEPT] or 0)
    if lifetime > 0 then return 'I7I7' .. ('I7I6'):rep((size - TIMES_FROM + 1) / 2), size, lifetime end
  end,
}
