-- Carries out plain plans in a straight line: spends of buckets that fit now or do not. Of these it says the same as spend.lua with
-- the algorithms, which know every other kind of plan, too.
--
-- limitgate/stores/redis/protocol/plain.py makes a script of it for plans of one shape: lines from "--bucket" to "--end" are
-- repeated for each bucket of a plan, with its place from 0 for $b, the number of its windows for $windows, and "--names",
-- "--asked", "--charge" and "--value" for what its algorithm has behind "--PLAIN" under these words; lines from "--ban" to "--end"
-- for each ban, which must not be there. Within these each line that ends in "--window" is repeated for each window of the bucket,
-- with its place in the plan from 1 for $w, and for $r that of what is reported of it. The algorithm gives
--   names   the names of what is asked of its windows
--   asked   reads that from a text, from a place on
--   charge  reads a bucket from its value, if it has one, and lets time go by: sets fits$b to false if the charge does not fit, and
--           is_known if the bucket is not as it is written here; reports how its windows stood
--   value   sets value and lifetime, in us, of the bucket after the charge
--
-- KEYS     the buckets, plan after plan, as many for each.
-- ARGV[1]  for each plan the number of what is asked of its windows, 16 bits; nothing if all ask the same.
-- ARGV[n+1] what is asked under number n, window after window.
-- Reply    a string of 64-bit integers: now; 1 if there was no memory to write; then per plan 1 if it was admitted and every charge
--          fitted, 2 if it was admitted and one of a rule that cannot refuse did not fit, 0 if it was refused, -1 if it was not
--          carried out, as a bucket is not as it is written here, or the request may wait; and what is reported of each window.

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
