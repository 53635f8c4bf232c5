-- Gives a ticket that holds to another client. Its number, its permits and its place stay.
--
-- KEYS  1 the name's key
-- ARGV  1 id so far   2 number in 16 digits   3 permits in 10 digits   4 capacity in 10 digits
--       5 new id      6 ttl in ms             7 channel:owner of the new client
--       8 how many ms to keep a mark for the id so far, or 0 for no mark
-- Reply 1 it is the ticket of the new client, and was renewed
--       0 it is not there, has expired or waits, its number, permits or capacity are others, or the new id was released
--         before; nothing was changed about it
--
-- If the ticket has the new id already, an earlier attempt has succeeded, and this renews it. An ask behind the owner
-- (ask.lua) stays.
--
-- If the user is denied a command in the middle: the state of a single holder has one id or the other. Of several
-- holders, the ticket is entered under the new id before it is removed under the old one. If the removal is denied, both
-- count, and the old one ends with its lease. The client releases what an adoption that failed may have left.

-- include record.lua
-- include line.lua

local key, from, id, now = KEYS[1], ARGV[1], ARGV[5], clock()
redis.call('HDEL', key .. ':line', '') -- changes nothing; a full server accepts the rest after it, a replica refuses it
local line = read(key, redis.call('GET', key), now)
if line.err then return line end

-- The record of a holder with this id that is the ticket in question.
local function holder(of)
  local record, place = find(line, of)
  if not record or place or end_of(record) <= now or string.sub(record, 1, 16) ~= ARGV[2] then return nil end
  if string.sub(record, 63, 72) ~= ARGV[3] or string.sub(record, 74, 83) ~= ARGV[4] then return nil end
  return record
end

local function adopt()
  if is_marked(line, id) then return 0 end
  -- A waiter that holds now may be the ticket.
  bury(line)
  grant(line)
  local had, record = id, holder(id)
  if not record then had, record = from, holder(from) end
  if not record then return 0 end
  if tonumber(ARGV[8]) > 0 then
    is_marked(line, from) -- refused before anything is done, if the mark may be at another node
    redis.call('SET', key .. ':gone:' .. from, '', 'PX', ARGV[8])
    line.marks = math.max(line.marks, now + ARGV[8])
  end
  local ask = string.match(record, '\n.*$', 85) or ''
  -- '=' in front of the channel says that the number was chosen by a client. It stays.
  local prolonged = with_expiry(record, now + ARGV[6])
  record = string.sub(prolonged, 1, 29) .. id .. string.sub(prolonged, 62, 84) .. ARGV[7] .. ask
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
