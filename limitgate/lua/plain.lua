-- Carries out plain plans in a straight line: spends of GCRA buckets that fit now or do not. Of these it says the same as spend.lua
-- with gcra.lua, which know every other kind of plan, too.
--
-- limitgate/stores/redis/protocol/plain.py makes a script of it for plans of one shape: lines from "--bucket" to "--end" are
-- repeated for each bucket of a plan, with its place from 0 for $b, and within these each line that ends in "--window" for each
-- window of that bucket, with its place in the plan from 1 for $w; lines from "--ban" to "--end" for each ban, which must not be
-- there.
--
-- KEYS     the buckets, plan after plan, as many for each.
-- ARGV[1]  for each plan the number of what is asked of its windows, 16 bits; nothing if all ask the same.
-- ARGV[n+1] what is asked under number n: for each window its id and count as a value holds them, then count, tolerance and
--          increment, the latter two in whole µs and a rest over count.
-- Reply    a string of 64-bit integers: now; 1 if there was no memory to write; then per plan 1 if it was admitted and every charge
--          fitted, 2 if it was admitted and one of a rule that cannot refuse did not fit, 0 if it was refused, -1 if it was not
--          carried out, as a bucket is not as it is written here; and per window what was owed before, in whole µs and a rest.

local values, pack, unpack, pcall, format = unpack, struct.pack, struct.unpack, redis.pcall, string.format
local VERSION, MAX_OWED = 1, 2^52
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply, size, all_ask_the_same, asked, place = {now, 0}, 2, ARGV[1] == '', 0, 0
--bucket
local mark$w, count$w, tolerance$w, tolerance_rest$w, increment$w, increment_rest$w --window
--end

for first = 1, #KEYS, $buckets do
  local number = all_ask_the_same and 1 or unpack('<H', ARGV[1], 2 * (first - 1) / $buckets + 1)
  if number ~= asked then
    asked, place = number, 1
    local text = ARGV[number + 1]
--bucket
    mark$w, count$w, tolerance$w, tolerance_rest$w, increment$w, increment_rest$w, place = unpack('<c12ddddd', text, place) --window
--end
  end
  local is_known, is_admitted, all_fit = true, true, true
--bucket
  local key$b, fits$b = KEYS[first + $b], true
  local value = pcall('GET', key$b)
  local whole$w, rest$w = 0, 0 --window
  if value and #value ~= $bytes then
    is_known = false
  elseif value then
    local version, written,
      stored$w, owed$w, owed_rest$w, --window
      _ = unpack('$value', value)
    local elapsed = now - written
    if version ~= VERSION or elapsed < 0 then is_known = false end
    if stored$w ~= mark$w or owed_rest$w >= count$w or owed$w > MAX_OWED then is_known = false end --window
    if owed$w >= elapsed then whole$w, rest$w = owed$w - elapsed, owed_rest$w end --window
  end
  local after$w, after_rest$w = whole$w + increment$w, rest$w + increment_rest$w --window
  if after_rest$w >= count$w then after$w, after_rest$w = after$w + 1, after_rest$w - count$w end --window
  if after$w > tolerance$w or (after$w == tolerance$w and after_rest$w > tolerance_rest$w) then fits$b = false end --window
  if not fits$b and $refuses then is_admitted = false end
  if not fits$b then all_fit = false end
  reply[size + 2 * $w], reply[size + (2 * $w + 1)] = whole$w, rest$w --window
--end
--ban
  if pcall('GET', KEYS[first + $b]) then is_known = false end
--end
  if not is_known then
    reply[size + 1] = -1
  elseif not is_admitted then
    reply[size + 1] = 0
  else
    reply[size + 1] = all_fit and 1 or 2
--bucket
    if fits$b then
      local lifetime = 0
      if after$w >= lifetime then lifetime = after_rest$w > 0 and after$w + 1 or after$w end --window
      local written = pcall('SET', key$b, pack('$value', VERSION, now,
        mark$w, after$w, after_rest$w, --window
        0), 'PX', format('%d', lifetime / 1000 + 2))
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
