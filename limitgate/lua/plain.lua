-- Carries out plain plans without loops: spends of buckets that either fit now or do not. The result is the same as
-- from spend.lua, which handles every kind of plan.
--
-- limitgate/stores/redis/plain.py generates a script from this file for plans of one shape. Lines from
-- "--bucket" to "--end" are repeated for each bucket of a plan: $b is its place from 0, $windows its number of
-- windows, and "--names", "--asked", "--read", "--charge" and "--value" are the pieces after "--PLAIN" of its algorithm.
-- Lines from "--ban" to "--end" are repeated for each ban, which must not exist. Within these, a line that ends in
-- "--window" is repeated for each window of the bucket: $w is its place in the plan from 1, $r the place of its
-- reported values. The pieces of the algorithm:
--   names   declares the variables of a charge
--   asked   reads them from a text at a place
--   read    reads a bucket from its value, if any, and advances it in time; sets is_known to false if the bucket is not
--           written in this form. An algorithm without refunds does this in its charge.
--   charge  sets fits$b to false if the charge does not fit; reports the state of its windows
--   value   sets value and lifetime, in us, of the bucket after the charge
--
-- KEYS     the buckets, plan after plan, the same number for each.
-- ARGV[1]  for each plan the number n of its charges, 16 bits; empty if all plans have the same charges.
-- ARGV[n+1] the charges with number n, window after window.
-- Reply    a string of 64-bit integers: now; 1 if there was no memory to write; then per plan 1 if it was admitted and
--          every charge fitted, 2 if it was admitted and a charge of a rule that cannot refuse did not fit, 0 if it was
--          refused, -1 if it was not carried out, because a bucket is not written in this form, or the request may
--          wait; then the reported values of each window.

local values, pack, unpack, pcall, format = unpack, struct.pack, struct.unpack, redis.pcall, string.format
local VERSION, MAX_OWED = 1, 2^52
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply, size, all_ask_the_same, asked, place = {now, 0}, 2, ARGV[1] == '', 0, 0
--bucket
--names
--end

for first = 1, #KEYS, $buckets do
  local number = all_ask_the_same and 1 or unpack('<H', ARGV[1], 2 * (first - 1) / $buckets + 1)
  if number ~= asked then
    asked, place = number, 1
    local text = ARGV[number + 1]
--bucket
--asked
--end
  end
  local is_known, is_admitted, all_fit, value, lifetime = true, true, true, nil, nil
--bucket
  local key$b, fits$b = KEYS[first + $b], true
  value = pcall('GET', key$b)
--read
--charge
  if not fits$b and $refuses then is_admitted = false end
  if not fits$b then all_fit = false end
--end
--ban
  if pcall('GET', KEYS[first + $b]) then is_known = false end
--end
  if not is_known or ($may_wait and not all_fit) then
    reply[size + 1] = -1
  elseif not is_admitted then
    reply[size + 1] = 0
  else
    reply[size + 1] = all_fit and 1 or 2
--bucket
    if fits$b then
--value
      local written = pcall('SET', key$b, value, 'PX', format('%d', lifetime / 1000 + 2))
      if written.err then
        if not written.err:find('OOM', 1, true) then return written end
        reply[2] = 1
      end
    end
--end
  end
  size = size + $numbers
end
return pack('<' .. ('i8'):rep(size), values(reply))
