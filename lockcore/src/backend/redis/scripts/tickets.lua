-- The tickets of one name, as a part of a reply.

-- Adds to the reply: the stored capacity or -1, how many of the records hold, record, record, …. The
-- records of tickets that hold come first. Apart from that they are in no particular order. `rows` is
-- the hash with the line, or nil if there is none. The other arguments are fields of the state: see
-- line.lua.
local function add_tickets(reply, rows, head, out, solo, stored)
  local holders, others = { solo }, {}
  for i = 1, rows and #rows or 0, 2 do
    -- A row at a place in front of `head` is not a ticket.
    local is_place = #rows[i] == 13
    if #rows[i + 1] > 13 and not (is_place and tonumber(rows[i]) < head) then
      local holds = not is_place and not solo and out > 0
      local records = holds and holders or others
      records[#records + 1] = rows[i + 1]
    end
  end
  reply[#reply + 1], reply[#reply + 2] = stored or -1, #holders
  for _, record in ipairs(holders) do reply[#reply + 1] = record end
  for _, record in ipairs(others) do reply[#reply + 1] = record end
  return reply
end
