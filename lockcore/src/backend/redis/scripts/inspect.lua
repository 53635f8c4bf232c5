-- Lists a name's tickets, in no order.
--
-- KEYS  1 tickets
-- Reply {now in ms, record, record, …}; reads only

-- include record.lua

local reply = { clock() }
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  if fields[i] ~= 'last' then reply[#reply + 1] = fields[i + 1] end
end
return reply
