-- Lists a name's tickets.
--
-- KEYS  1 the name's key
-- Reply {now in ms, stored capacity or -1, how many of the records hold, record, record, …}. The
--       records of tickets that hold come first. Apart from that they are in no particular order.
--
-- The script only reads.

-- include line.lua

local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
local holders, others = { line.solo }, {}
if line.is_line then
  local rows = redis.call('HGETALL', line.rows)
  for i = 1, #rows, 2 do
    -- A row at a place in front of `head` is not a ticket.
    local is_place = #rows[i] == 13
    if #rows[i + 1] > 13 and not (is_place and tonumber(rows[i]) < line.head) then
      local holds = not is_place and not line.solo and line.out > 0
      local records = holds and holders or others
      records[#records + 1] = rows[i + 1]
    end
  end
end
local reply = { line.now, line.stored or -1, #holders }
for _, record in ipairs(holders) do reply[#reply + 1] = record end
for _, record in ipairs(others) do reply[#reply + 1] = record end
return reply
