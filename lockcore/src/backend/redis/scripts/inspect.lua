-- Lists a name's tickets.
--
-- KEYS  1 the name's key
-- Reply {now in ms, and the tickets in the form of tickets.lua}
--
-- The script only reads.

-- include tickets.lua
-- include line.lua

local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
local rows = line.is_line and redis.call('HGETALL', line.rows)
return add_tickets({ line.now }, rows, line.head, line.out, line.solo, line.stored)
