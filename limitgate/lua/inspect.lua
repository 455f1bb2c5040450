-- Inspects the server of a new connection: whether the user may run limitgate/lua/spend.lua, the eviction policy,
-- and the origin of its data. It changes nothing.
--
-- ARGV   the known key prefixes.
-- Reply  {missing rights in ACL SETUSER syntax and bare names of unknown commands; the text of INFO, empty if not
--         permitted}.

-- nil before Redis 7
local may = redis.acl_check_cmd

-- The check raises an error for an unknown command.
local function is_permitted(...)
  local is_known, is_allowed = pcall(may, ...)
  return is_known and is_allowed
end

-- What a call lacks: the right to the command, the right to the key, the command, or nothing. The check crashes
-- some servers if arguments are missing, and does not say which right is missing. The call itself does, and is
-- harmless because the key is unused.
local COMMAND, KEY, UNKNOWN = 1, 2, 3
local function lacking(call)
  if may and is_permitted(unpack(call)) then return end
  local answer = redis.pcall(unpack(call))
  local text = type(answer) == 'table' and answer.err or ''
  if text:find('Unknown .*command called') then return UNKNOWN end
  if text:find('access .*key') then return KEY end
  -- "run this command" up to Redis 7.0, "run the 'get' command" since.
  return (may or text:find('run th')) and COMMAND
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
