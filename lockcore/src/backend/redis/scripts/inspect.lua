-- Lists a name's tickets, in no particular order.
--
-- KEYS  1 the name's key
-- Reply {now in ms, record, record, …}. The script only reads.

-- include record.lua
-- include line.lua

local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
local reply = { line.now, line.solo }
if line.is_line then
  local rows = redis.call('HGETALL', line.rows)
  for i = 1, #rows, 2 do
    -- A row at a place that the line has passed is not a ticket.
    local is_place = #rows[i] == 13
    if #rows[i + 1] > 13 and not (is_place and tonumber(rows[i]) < line.head) then
      reply[#reply + 1] = rows[i + 1]
    end
  end
end
return reply
