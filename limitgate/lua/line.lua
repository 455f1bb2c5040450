-- The line of the requests that wait for a budget. Twin of limitgate/algorithms/line.py.
--
-- Bucket: virtual time, then records of six values. A ticket has name, tenant, start, input, output and remaining time, in
-- the order of their turns; after the tickets, a tenant has 0, its name, and the end of its last ticket. Charge: nothing.
-- Adjustment: action, name of the ticket, tenant, input, output, and time to stay. Reported: tickets ahead of the one that
-- joined, their input and output, and the number of tickets.

local NOW, SIZE, VALUES = FIRST, 42, 6
local JOIN, TAKE = 1, 3
local MAX_TICKETS, KEPT = 256, 60000000

local function begin(bucket)
  bucket[NOW], bucket.tickets, bucket.ends = 0, {}, {}
end

local function end_of(bucket, tenant)
  for _, each in ipairs(bucket.ends) do
    if each.tenant == tenant then return math.max(bucket[NOW], each.till) end
  end
  return bucket[NOW]
end

-- Set when the last ticket of a tenant ends. Forget ends in the past.
local function set_end(bucket, tenant, till)
  local ends = {}
  for _, each in ipairs(bucket.ends) do
    if each.tenant ~= tenant and each.till > bucket[NOW] then ends[#ends + 1] = each end
  end
  if till > bucket[NOW] then ends[#ends + 1] = {tenant = tenant, till = till} end
  if #ends > MAX_TICKETS then table.remove(ends, 1) end
  bucket.ends = ends
end

local function end_after(ticket)
  return ticket.start + math.max(1, ticket.input + ticket.output)
end

local function tell(bucket, place)
  local input, output = 0, 0
  for at = 1, place - 1 do
    input, output = input + bucket.tickets[at].input, output + bucket.tickets[at].output
  end
  bucket.ahead = {place - 1, input, output}
end

return {
  charge_format = '',
  adjustment_format = 'dddddd',
  layout = function(size)
    local records = (size - 7) / SIZE
    return records >= 0 and records == floor(records) and 'I7' .. ('I7'):rep(VALUES * records)
  end,
  advance = function(bucket, elapsed)
    local tickets, ends = {}, {}
    if elapsed < KEPT then
      for at = NOW + 1, #bucket, VALUES do
        local name, tenant, start, input, output, left = values(bucket, at, at + VALUES - 1)
        if name == 0 then
          ends[#ends + 1] = {tenant = tenant, till = start}
        elseif left > elapsed then
          tickets[#tickets + 1] =
            {name = name, tenant = tenant, start = start, input = input, output = output, left = left - elapsed}
        end
      end
    else
      bucket[NOW] = 0
    end
    for at = #bucket, NOW + 1, -1 do bucket[at] = nil end
    bucket.tickets, bucket.ends = tickets, ends
    if bucket[NOW] > MAX_OWED then
      begin(bucket)
      return true
    end
  end,
  check = function(bucket)
    if not bucket.tickets then begin(bucket) end
    local ahead, n = bucket.ahead or {0, 0, 0}, #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = ahead[1], ahead[2], ahead[3], #bucket.tickets
    return true
  end,
  reset = begin,
  apply_adjustment = function(bucket, charge)
    if not bucket.tickets then begin(bucket) end
    local action, name, tenant, input, output, left = values(charge.adjustment, 1, 6)
    local tickets, place = bucket.tickets, nil
    for at, ticket in ipairs(tickets) do
      if ticket.name == name then place = at end
    end
    if action == JOIN then
      if place then
        tickets[place].left = left
      elseif #tickets >= MAX_TICKETS then
        place = #tickets + 1
      else
        local ticket =
          {name = name, tenant = tenant, start = end_of(bucket, tenant), input = input, output = output, left = left}
        place = 1
        while tickets[place] and tickets[place].start <= ticket.start do place = place + 1 end
        table.insert(tickets, place, ticket)
        set_end(bucket, tenant, end_after(ticket))
      end
      return tell(bucket, place)
    end
    tell(bucket, 1)
    if not place then return end
    local ticket = table.remove(tickets, place)
    local till = end_of(bucket, ticket.tenant)
    if action == TAKE then
      bucket[NOW] = math.max(bucket[NOW], ticket.start)
    elseif till == end_after(ticket) then
      till = ticket.start
    end
    set_end(bucket, ticket.tenant, till)
  end,
  encode = function(bucket)
    local size = NOW
    for _, each in ipairs(bucket.tickets) do
      for n, value in ipairs({each.name, each.tenant, each.start, each.input, each.output, each.left}) do
        bucket[size + n] = value
      end
      size = size + VALUES
    end
    for _, each in ipairs(bucket.ends) do
      for n, value in ipairs({0, each.tenant, each.till, 0, 0, 0}) do bucket[size + n] = value end
      size = size + VALUES
    end
    if size > NOW then return 'I7' .. ('I7'):rep(size - NOW), size, KEPT end
  end,
}
