-- Writes the snapshot of one process, or reads those of all. Twin of `MemoryStore.config` for a `FleetRequest`.
--
-- KEYS[1]  the index: ids of 16 characters, each followed by a line break. A snapshot is at the index' key, a colon and the id,
--          in the same hash slot.
-- KEYS[2]  the key of the own snapshot, if there is one to write.
-- ARGV     empty to read; else the id, the snapshot (empty to remove it), its milliseconds to live, those of the index, and
--          1 to renew the index.
-- Reply    {the server's clock in Unix µs, the number of processes, the snapshots if read}. A snapshot that is too long is
--          replaced by an empty text.

local WIDTH, MOST, LONGEST = 17, 4096, 65536
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local index = redis.pcall('GET', KEYS[1])
if type(index) == 'table' then
  if not index.err:find('WRONGTYPE', 1, true) then return index end
  index = false
end
-- Anything else has another length, except by chance: then its ids name no snapshots.
if not index or #index % WIDTH ~= 0 then index = '' end

local function living(note)
  local found = {}
  for at = 1, math.min(#index, WIDTH * MOST), WIDTH do
    local id = index:sub(at, at + WIDTH - 1)
    local snapshot = redis.pcall('GET', KEYS[1] .. ':' .. id:sub(1, -2))
    if type(snapshot) == 'string' then
      found[#found + 1] = id
      note(snapshot)
    end
  end
  return table.concat(found)
end

-- Reading writes nothing, so that replicas may be read: ids of processes that are gone stay until another one comes.
if #ARGV == 0 then
  local reply = {now, 0}
  local left = living(function(snapshot)
    reply[#reply + 1] = #snapshot <= LONGEST and snapshot or ''
  end)
  reply[2] = #left / WIDTH
  return reply
end

local id, snapshot = ARGV[1], ARGV[2]
if snapshot == '' then
  redis.call('DEL', KEYS[2])
else
  redis.call('SET', KEYS[2], snapshot, 'PX', ARGV[3])
end
local is_listed = index:find(id .. '\n', 1, true)
if not is_listed or snapshot == '' then
  index = living(function() end)
  if snapshot ~= '' then index = index .. id .. '\n' end
end
if not is_listed or snapshot == '' or ARGV[5] == '1' then
  redis.call('SET', KEYS[1], index, 'PX', ARGV[4])
end
return {now, #index / WIDTH}
