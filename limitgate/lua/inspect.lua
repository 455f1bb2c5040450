-- Tells what a connection that is new leads to: whether this user may do what limitgate/lua/spend.lua does, what the server does
-- when it is full, and whose data it has. Nothing is changed by it.
--
-- ARGV   the prefixes of our keys, as far as they are known.
-- Reply  {the rights that are missing, as ACL SETUSER spells them, and what INFO says, nothing if it may not be read}.

local may = redis.acl_check_cmd  -- nothing before Redis 7

-- What a call lacks: the right to run the command, that to the key, or nothing. The check crashes some servers where arguments
-- are missing, and does not say which of the two it is; the call itself does, and is harmless: nobody uses the key.
local COMMAND, KEY = 1, 2
local function lacking(call)
  if may and may(unpack(call)) then return end
  local answer = redis.pcall(unpack(call))
  local text = type(answer) == 'table' and answer.err or ''
  if text:find('access .*key') then return KEY end
  return (may or text:find('run this command', 1, true)) and COMMAND
end

local rights, known = {}, {}
local function missing(right)
  if not known[right] then rights[#rights + 1] = right end
  known[right] = true
end

for _, call in ipairs({{'evalsha', '', 0}, {'time'}}) do
  if lacking(call) then missing('+' .. call[1]) end
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
    if what == COMMAND then missing('+' .. call[1]) end
    if what == KEY then missing('~' .. prefix .. ':*') end
  end
end

local function info(section)
  local text = (not may or may('info', section)) and redis.pcall('info', section)
  return type(text) == 'string' and text or ''
end

return {rights, info('memory') .. info('server') .. info('replication')}
