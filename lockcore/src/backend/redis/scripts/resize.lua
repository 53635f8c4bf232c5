-- Reads or changes the stored capacity of a name. Sends wake-ups to the waiters that hold because
-- of it.
--
-- KEYS  1 the name's key
-- ARGV  1 the request's id
--       2 what to do: 'read'; 'keep', a read that also writes; 'set'; 'forget'
--       3 the capacity to store, or empty
--       4 the last change that the client has read, or empty
--       5 the capacity that tickets may have. If no capacity is stored, the oldest holder must have
--         it. To forget a stored capacity, every ticket must have it
-- Reply {outcome, stored capacity or -1, last change or empty}. The outcome is
--         0 carried out
--         1 another change has come after the one that the client has read
--       Or {2, capacity in use, empty}, if a ticket has another capacity. If the outcome is not 0,
--       nothing has changed.
--
-- While a capacity is stored, the state contains this capacity and the id of the last change: see
-- line.lua. The stored capacity counts in place of the capacities of the tickets. The state and the
-- rows say which tickets hold, so a smaller capacity takes no grant back.
--
-- When a capacity is forgotten, a mark remembers the id of that change for a minute. If an older
-- change comes late, it finds another id than the one it names, and does nothing.
--
-- If the user is denied a command in the middle: see put_down() in line.lua. The client repeats the
-- request with the same id.

-- include line.lua

local MARK_MS = '60000'
local key, id, verb = KEYS[1], ARGV[1], ARGV[2]
local mark = key .. ':gone:capacity'

-- This HDEL changes nothing. A full server accepts it, and then the rest of the script. A replica
-- refuses it.
if verb ~= 'read' then redis.call('HDEL', key .. ':line', '') end
local line = read(key, redis.call('GET', key), clock())
if line.err then return line end
-- While the slot is moved to this node of a cluster, the mark may be at the old node. Then the
-- server refuses this EXISTS, because it is about two keys and one of them is missing.
if verb ~= 'read' and not line.change and ARGV[#ARGV] == 'asking' then redis.call('EXISTS', key, mark) end
local change, stated = line.change or redis.call('GET', mark) or '', tonumber(ARGV[5])

-- The capacity of a ticket that does not allow this change.
local function other()
  if not line.stored then return line.out > 0 and line.capacity ~= stated and line.capacity end
  if verb == 'set' then return false end
  local records = { line.solo }
  local rows = redis.call('HGETALL', line.rows)
  for i = 1, #rows, 2 do
    local is_passed = #rows[i] == 13 and tonumber(rows[i]) < line.head
    if #rows[i + 1] > 13 and not is_passed then records[#records + 1] = rows[i + 1] end
  end
  for _, record in ipairs(records) do
    local _, capacity = size(record)
    if capacity ~= stated and end_of(record) > line.now then return capacity end
  end
  return false
end

local function resize()
  bury(line)
  grant(line)
  if change == id then
    line.raise = true -- written again: replicas that acknowledge this have the change
    return 0
  end
  if change ~= ARGV[4] then return 1 end
  local in_use = other()
  if in_use then return 2, in_use end
  if verb == 'set' then
    line.stored, line.change = tonumber(ARGV[3]), id
  else
    redis.call('SET', mark, id, 'PX', MARK_MS)
    line.stored, line.change, line.capacity = nil, nil, stated
  end
  change = id
  grant(line)
  return 0
end

local outcome, in_use = 0
if verb == 'keep' then
  settle(line, {}, function() line.raise = line.was end)
elseif verb ~= 'read' then
  outcome, in_use = settle(line, {}, resize)
  if line.denied then return line.denied end
end
if outcome == 2 then return { 2, in_use, '' } end
return { outcome, line.stored or -1, change }
