-- Refunds charges of plain.lua without loops. The result is the same as from spend.lua, which handles every kind of
-- plan.
--
-- limitgate/stores/redis/plain.py generates a script from this file as from plain.lua, with the pieces
-- "--names", "--asked", "--read" and "--value", and
--   refund  refunds the charge made ``since`` us ago; sets is_known to false if the bucket is not written in this form
--
-- KEYS     the buckets, refund after refund, the same number for each.
-- ARGV[1]  for each refund the number n of its charges, 16 bits; empty if all refunds have the same charges.
-- ARGV[2]  doubles: for each refund the time of the charge, and the grace of each window.
-- ARGV[n+2] the charges with number n, window after window.
-- Reply    a string of 64-bit integers: now; 1 if there was no memory to write; then per refund 1, or -1 if it was not
--          made, because a bucket is not written in this form.

local values, pack, unpack, pcall, format, max = unpack, struct.pack, struct.unpack, redis.pcall, string.format, math.max
local VERSION, MAX_OWED = 1, 2^52
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply, all_are_the_same, charged, place, given, at = {now, 0}, ARGV[1] == '', 0, 0, ARGV[2], 1
--bucket
--names
--end

for first = 1, #KEYS, $buckets do
  local number = all_are_the_same and 1 or unpack('<H', ARGV[1], 2 * (first - 1) / $buckets + 1)
  if number ~= charged then
    charged, place = number, 1
    local text = ARGV[number + 2]
--bucket
--asked
--end
  end
  local is_known, value, lifetime, since = true, nil, nil, nil
  since, at = unpack('<d', given, at)
  since = max(0, now - since)
--bucket
  local key$b = KEYS[first + $b]
  local grace$w --window
  grace$w, at = unpack('<d', given, at) --window
  value = pcall('GET', key$b)
--read
--refund
--end
  reply[#reply + 1] = is_known and 1 or -1
  if is_known then
--bucket
--value
    if lifetime == 0 then
      redis.call('DEL', key$b)
    else
      local written = pcall('SET', key$b, value, 'PX', format('%d', lifetime / 1000 + 2))
      if written.err then
        if not written.err:find('OOM', 1, true) then return written end
        reply[2] = 1
      end
    end
--end
  end
end
return pack('<' .. ('i8'):rep(#reply), values(reply))
