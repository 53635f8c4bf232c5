-- Deletes the data of a name that is not in use.
--
-- KEYS  1 the name's key
-- Reply 1 forgotten, 0 in use
--
-- The id of the last change of the stored capacity stays for a minute: see resize.lua. Tickets that
-- have expired are removed first. If the user is denied a command in the middle: see
-- put_down() in line.lua.

-- include line.lua

redis.call('HDEL', KEYS[1] .. ':line', '') -- changes nothing; a full server accepts the rest after it, a replica refuses it
local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
settle(line, {}, function()
  bury(line)
  grant(line)
end)
if line.denied then return line.denied end
if line.out > 0 or line.head < line.next or line.marks > line.now then return 0 end
if line.stored then redis.call('SET', line.key .. ':gone:capacity', line.change, 'PX', '60000') end
redis.call('DEL', line.key, line.rows, line.ends)
return 1
