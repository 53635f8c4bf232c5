-- Asks the client of a ticket to give it up: writes the ask behind the owner in the ticket's record, and sends a message.
--
-- KEYS  1 the name's key
-- ARGV  1 the ticket's id   2 the ask: the grace in ms, and a text without line breaks
-- Reply 1 it is there; 0 it is not.
--
-- The message says that the client must renew the ticket, and the renewal says that somebody asks for it. So a message
-- that is lost, or denied, delays this until the next renewal. A version of the library that does not know about asks
-- takes the ask for a part of the owner, and ignores the message.

-- include record.lua
-- include line.lua

local id = ARGV[1]
redis.call('HDEL', KEYS[1] .. ':line', '') -- changes nothing; a full server accepts the rest after it, a replica refuses it
local line = read(KEYS[1], redis.call('GET', KEYS[1]), clock())
if line.err then return line end
local record, place = find(line, id)
if not record or end_of(record) <= line.now then return 0 end
record = string.match(record, '^[^\n]*') .. '\n' .. ARGV[2]
settle(line, {}, function() change(line, place, id, record) end)
tell(line.key, record, 'again 0')
return 1
