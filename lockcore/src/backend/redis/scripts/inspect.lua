-- Lists a name's tickets, in no order.
--
-- KEYS  1 the name's key
-- Reply {now in ms, record, record, …}; reads only

-- include record.lua
-- include line.lua

local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
local reply = { line.now, line.solo }
if line.is_line then
  local rows = redis.call('HGETALL', line.rows)
  for i = 2, #rows, 2 do
    if #rows[i] > 13 then reply[#reply + 1] = rows[i] end
  end
end
return reply
