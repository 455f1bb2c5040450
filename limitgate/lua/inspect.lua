-- Tells what a connection that is new leads to: whether this user may do what limitgate/lua/spend.lua does, what the server does
-- when it is full, and whose data it has. Nothing is changed by it.
--
-- ARGV   the prefixes of our keys, as far as they are known.
-- Reply  {the rights that are missing, as ACL SETUSER spells them, and commands that the server does not know, by their bare
--         names; what INFO says, nothing if it may not be read}.

local may = redis.acl_check_cmd  -- nothing before Redis 7

-- The check raises an error for a command that the server does not know.
local function is_permitted(...)
  local is_known, is_allowed = pcall(may, ...)
  return is_known and is_allowed
end

-- What a call lacks: the right to run the command, that to the key, the command itself, or nothing. The check crashes some
-- servers where arguments are missing, and does not say which of them it is; the call itself does, and is harmless: nobody uses
-- the key.
local COMMAND, KEY, UNKNOWN = 1, 2, 3
local function lacking(call)
  if may and is_permitted(unpack(call)) then return end
  local answer = redis.pcall(unpack(call))
  local text = type(answer) == 'table' and answer.err or ''
  if text:find('Unknown Redis command', 1, true) then return UNKNOWN end
  if text:find('access .*key') then return KEY end
  return (may or text:find('run this command', 1, true)) and COMMAND
end

local words, known = {}, {}
local function missing(word)
  if not known[word] then words[#words + 1] = word end
  known[word] = true
end

for _, call in ipairs({{'evalsha', '', 0}, {'time'}}) do
  local what = lacking(call)
  if what then missing(what == UNKNOWN and call[1] or '+' .. call[1]) end
end
for _, prefix in ipairs(ARGV) do
  local key = prefix .. ':inspected'
  for _, call in ipairs({
    {'get', key},
    {'set', key, '', 'PX', 'never'},
    {'del', key},
    {'getrange', key, 0, 0},
    {'setrange', key, 0, ''},
    {'strlen', key},
    {'pexpire', key, 1},
  }) do
    local what = lacking(call)
    if what == UNKNOWN then missing(call[1]) end
    if what == COMMAND then missing('+' .. call[1]) end
    if what == KEY then missing('~' .. prefix .. ':*') end
  end
end

local function info(section)
  local text = (not may or is_permitted('info', section)) and redis.pcall('info', section)
  return type(text) == 'string' and text or ''
end

return {words, info('memory') .. info('server') .. info('replication')}
