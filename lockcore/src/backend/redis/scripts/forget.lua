-- Deletes the data of a name that is not in use.
--
-- KEYS  1 the name's key
-- Reply 1 forgotten, 0 in use
--
-- There is only one write. If it is denied, nothing has been done.

-- include record.lua
-- include line.lua

local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
if line.out > 0 or line.head < line.next or line.marks > line.now then return 0 end
redis.call('DEL', line.key, line.rows, line.ends, line.key .. ':gone:capacity')
return 1
