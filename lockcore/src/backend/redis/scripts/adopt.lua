-- Gives a ticket that holds to another client. The ticket keeps its number, its permits and its
-- place.
--
-- KEYS  1 the name's key
-- ARGV  1 id so far   2 number in 16 digits   3 permits in 10 digits   4 capacity in 10 digits
--       5 new id      6 ttl in ms             7 channel:owner of the new client
--       8 how many ms to keep a mark for the id so far, or 0 for no mark
-- Reply 1 the ticket belongs to the new client, and was renewed
--       0 the ticket does not exist, has expired or waits; or its number, permits or capacity are
--         different; or the new id was released before. Nothing was changed about the ticket
--
-- If the ticket has the new id already, an earlier attempt has succeeded, and this attempt renews
-- the ticket. If the ticket was asked back, the ask-back behind its owner (ask.lua) stays.
--
-- If the user is denied a command in the middle: the state of a single holder has one id or the
-- other. If there are several holders, the ticket is entered under the new id before it is removed
-- under the old one. The removal is an HDEL, and the script begins with an HDEL of the same key. So
-- a client that may not remove the old entry has changed nothing. The client releases what an
-- adoption that failed may have left.

-- include line.lua

local key, from, id, now = KEYS[1], ARGV[1], ARGV[5], clock()
redis.call('HDEL', key .. ':line', '') -- changes nothing; a full server accepts the rest after it, a replica refuses it
local line = read(key, redis.call('GET', key), now)
if line.err then return line end

-- The record under this id, if its ticket holds and is the ticket that the request describes.
local function holder(of)
  local record, place = find(line, of)
  if not record or place or end_of(record) <= now or string.sub(record, NUMBER, NUMBER_END) ~= ARGV[2] then return nil end
  if string.sub(record, PERMITS, PERMITS_END) ~= ARGV[3] or string.sub(record, CAPACITY, CAPACITY_END) ~= ARGV[4] then return nil end
  return record
end

local function adopt()
  if is_marked(line, id) then return 0 end
  -- May refuse the request if the slot is being moved. Nothing has been done until now.
  if tonumber(ARGV[8]) > 0 then is_marked(line, from) end
  -- The ticket may be a waiter whose turn has come only now.
  bury(line)
  grant(line)
  local had, record = id, holder(id)
  if not record then had, record = from, holder(from) end
  if not record then return 0 end
  -- If the ticket was granted only now, it gets no message and keeps its lease. A message would
  -- name an id that is gone. And if nobody heard it, the record under this id would be written
  -- again, with a shortened lease: the client that is told that it holds would lose the ticket.
  line.renewed[from] = true
  if tonumber(ARGV[8]) > 0 then
    redis.call('SET', key .. ':gone:' .. from, '', 'PX', ARGV[8])
    line.marks = math.max(line.marks, now + ARGV[8])
  end
  local ask = string.match(record, '\n.*$', CHANNEL) or ''
  -- In front of the channel, '=' says that the client has chosen the number. It stays.
  local prolonged = prolong(line, record, ARGV[6])
  record = string.sub(prolonged, NUMBER, EXPIRES_END) .. id .. string.sub(prolonged, BEFORE_PERMITS, MARK) .. ARGV[7] .. ask
  line.raise = true
  if line.solo or had == id then
    change(line, nil, id, record)
  else
    hold(line, id, record, (size(record)))
    let_go(line, from, record)
  end
  return 1
end

local found = settle(line, {}, adopt)
return line.denied or found
