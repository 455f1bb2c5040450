-- Reads or replaces a configuration text. Twin of `MemoryStore.config`.
--
-- KEYS[1]  the key.
-- ARGV     empty to read; else the new text, and optionally the only version to replace (or empty text), and the
--          milliseconds after which it is deleted.
-- Reply    the value afterwards; nil if there is none. A value is version, space, text: '3 {"limits":...}'.
--          The version is the number of changes. Any other kind of value is reported as empty text.

local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then
  if not value.err:find('WRONGTYPE', 1, true) then return value end
  value = ''
end
local text, expected = ARGV[1], tonumber(ARGV[2])
local version = not value and 0 or tonumber(value:match('^(%d+) '))
if not text or (expected and expected ~= version) then return value end
value = ('%.0f '):format((version or 0) + 1) .. text
if ARGV[3] then redis.call('SET', KEYS[1], value, 'PX', ARGV[3]) else redis.call('SET', KEYS[1], value) end
return value
