-- Asks the holder of a ticket to give the ticket up. Writes the ask-back behind the owner in the
-- ticket's record, and sends a message.
--
-- KEYS  1 the name's key
-- ARGV  1 the ticket's id   2 the ask: the grace in ms, and a text without line breaks
-- Reply 1 the ticket exists; 0 it does not.
--
-- The message makes the client renew the ticket, and the reply to the renewal says that the ticket
-- is asked back. If the message is lost or denied, the client learns of the ask-back from its next
-- renewal. A version of the library that does not know ask-backs ignores the message. It reads the
-- ask-back as a part of the owner.

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
