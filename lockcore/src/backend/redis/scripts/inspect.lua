-- Lists a name's tickets, oldest first.
--
-- KEYS  1 tickets, 2 queue
-- Reply {now in ms, id, number, record, id, number, record, …}; reads only
-- include line.lua

local now = clock()
local reply = { now }
local order = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #order, 2 do
  local record = redis.call('HGET', KEYS[1], order[i])
  if record then
    reply[#reply + 1] = order[i]
    reply[#reply + 1] = order[i + 1]
    reply[#reply + 1] = record
  end
end
return reply
