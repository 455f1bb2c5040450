-- Warming up. Twin of limitgate/algorithms/warm_up.py.
--
-- Bucket: count, debt, warmth. Charge: count, maximum warmth, maximum wait, and the warmth and ticks of the
-- requests. Adjustment: amount to return in ticks and in warmth, time until the turn, grace, and the warmth after
-- the charge. Reported: debt and warmth.
--
-- A debt is two numbers: whole microseconds and a rest over count. Warmth is in ticks, which stay small enough.

local COUNT, WHOLE, REST, WARMTH = FIRST, FIRST + 1, FIRST + 2, FIRST + 3
local MAX_WARMTH = 2^50

-- Extra ticks that requests cost while a cold window warms up to this warmth, rounded up.
local function toll(warmth, full)
  local part = math.min(warmth, floor(full / 2))
  local quotient, left = multiplied(2 * part, full - part, full)
  return left > 0 and quotient + 1 or quotient
end

-- Difference between the tolls of two warmths. From half the maximum on, the toll is constant.
local function toll_between(warmth, warmer, full)
  if warmth == warmer or 2 * warmth > full then return 0 end
  return toll(warmer, full) - toll(warmth, full)
end

-- Cool a window for idle microseconds, less a rest.
local function cool(bucket, idle, rest)
  local warmth, count = bucket[WARMTH], bucket[COUNT]
  -- More has no effect.
  idle = math.min(idle, floor(warmth / count) + 2)
  bucket[WARMTH] = math.max(0, warmth - (idle * count - rest))
end

local function advance(bucket, elapsed)
  local count, whole, rest = bucket[COUNT], bucket[WHOLE], bucket[REST]
  if count < 1 or rest >= count or whole > MAX_OWED or bucket[WARMTH] > MAX_WARMTH then
    bucket[COUNT], bucket[WHOLE], bucket[REST], bucket[WARMTH] = 1, 0, 0, 0
    return true
  end
  if whole < elapsed then
    cool(bucket, elapsed - whole, rest)
    bucket[WHOLE], bucket[REST] = 0, 0
  else
    bucket[WHOLE] = whole - elapsed
  end
end

-- Adopt a bucket that is new or has another count. Warmth above the maximum stays until the bucket is written, as
-- it is after a clock step, so that reads do not affect later plans of this call.
local function adopt(bucket, charge)
  local count, full = charge[1], charge[2]
  if not bucket[COUNT] then
    bucket[COUNT], bucket[WHOLE], bucket[REST], bucket[WARMTH] = count, 0, 0, 0
  elseif bucket[COUNT] ~= count then
    bucket[WHOLE], bucket[REST] = rescaled(bucket[WHOLE], bucket[REST], bucket[COUNT], count)
    bucket[COUNT], bucket[WARMTH], bucket.changed = count, math.min(bucket[WARMTH], full), true
  elseif bucket.changed and not bucket.adopted then
    bucket[WARMTH] = math.min(bucket[WARMTH], full)
  end
  bucket.adopted = true
end

-- Add whole microseconds, a rest and ticks to the debt, which never falls below zero.
local function owe(bucket, whole, rest, ticks)
  local count = bucket[COUNT]
  rest = bucket[REST] + rest + ticks % count
  whole = bucket[WHOLE] + whole + floor(ticks / count) + floor(rest / count)
  rest = rest % count
  if whole < 0 then whole, rest = 0, 0 end
  if whole >= MAX_OWED then whole, rest = MAX_OWED, 0 end
  bucket[WHOLE], bucket[REST] = whole, rest
end

-- Charge requests, given as warmth and ticks.
local function charge_more(bucket, full, warmth, whole, rest)
  local before = math.min(bucket[WARMTH], full)
  bucket[WARMTH] = math.min(full, before + warmth)
  owe(bucket, whole, rest, toll_between(before, bucket[WARMTH], full))
end

-- Refund a charge as if it had been the last one. The part that has drained since has cooled the window instead. A
-- future turn is not refunded if others are queued behind it.
local function put_back(bucket, full, amount, elapsed)
  local whole, rest, warmth, turn, grace, warmest = values(amount, 1, 6)
  local count, before, idle = bucket[COUNT], bucket[WARMTH], math.max(0, elapsed - grace)
  local other = math.max(0, before - warmth)
  -- The warmth before the window cooled.
  local paid_at = math.min(full, math.max(before, warmest))
  local ticks = rest + toll_between(math.max(0, paid_at - warmth), paid_at, full)
  whole, rest = whole + floor(ticks / count), ticks % count
  -- The debt would be less without later requests.
  local last = whole + grace + 1 - elapsed
  if turn > elapsed and (bucket[WHOLE] > last or (bucket[WHOLE] == last and bucket[REST] >= rest)) then return end
  bucket[WARMTH] = other
  if whole < idle then
    cool(bucket, whole, -rest)
  else
    cool(bucket, idle, 0)
    owe(bucket, idle - whole, -rest, 0)
  end
end

return {
  charge_format = 'dddddd',
  adjustment_format = 'dddddd',
  layout = function(size) return size == 26 and 'I6I7I6I7' end,
  advance = advance,
  check = function(bucket, charge)
    adopt(bucket, charge)
    local n, whole, rest, ahead = #reply, bucket[WHOLE], bucket[REST], charge[3]
    reply[n + 1], reply[n + 2], reply[n + 3] = whole, rest, math.min(bucket[WARMTH], charge[2])
    return whole < ahead or (whole == ahead and rest == 0)
  end,
  wait = function(bucket, charge)
    return bucket[WHOLE] + (bucket[REST] > 0 and 1 or 0)
  end,
  commit = function(bucket, charge, turn)
    -- The time until the turn becomes debt, and cools the window while it is idle.
    if bucket[WHOLE] < turn then
      bucket[WARMTH] = math.min(bucket[WARMTH], charge[2])
      cool(bucket, turn - bucket[WHOLE], bucket[REST])
      bucket[WHOLE], bucket[REST] = turn, 0
    end
    charge_more(bucket, charge[2], charge[4], charge[5], charge[6])
  end,
  reset = function(bucket, charge)
    bucket[COUNT], bucket[WHOLE], bucket[REST], bucket[WARMTH] = charge[1], 0, 0, 0
  end,
  apply_adjustment = function(bucket, charge)
    adopt(bucket, charge)
    local whole, rest, warmth = values(charge.adjustment, 1, 3)
    bucket[WARMTH] = math.min(bucket[WARMTH], charge[2])
    if whole < 0 then
      charge_more(bucket, charge[2], -warmth, -whole, -rest)
    elseif whole > 0 or rest > 0 then
      put_back(bucket, charge[2], charge.adjustment, math.max(0, now - charge.as_of))
    end
  end,
  encode = function(bucket)
    local count, whole, rest, warmth = values(bucket, FIRST, WARMTH)
    if count and (whole > 0 or rest > 0 or warmth > 0) then
      return 'I6I7I6I7', WARMTH, whole + floor((rest + warmth + count - 1) / count)
    end
  end,
}
