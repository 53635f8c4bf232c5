-- A ticket as it is written, the clock that it is judged by, and how its client learns that it holds.
--
-- A record is its number in 16 digits, when it expires in 13, its id in 32, and then ':permits:capacity:channel:owner',
-- permits and capacity in 10 digits. So each has a fixed place, but the channel's end: number 1 to 16, expiry 17 to
-- 29, id 30 to 61, permits 63 to 72, capacity 74 to 83, channel from 85. A test in layout.rs holds all of the scripts
-- to these places.
--
-- It expires at so many ms of the server's clock; or, if that begins with '+', so many ms after its number, which is
-- the clock of its grant in microseconds then. So a ticket that is new is written as the client has sent it.

-- Server time in milliseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- When it expires, in ms of the server's clock; nil if this library has not written it. `at` is for a record that is
-- behind so many bytes.
local function end_of(record, at)
  at = at or 0
  local ends = tonumber(string.sub(record, at + 17, at + 29))
  if string.byte(record, at + 17) ~= 43 then return ends end -- '+'
  local number = tonumber(string.sub(record, at + 1, at + 16))
  return ends and number and (number - number % 1000) / 1000 + ends
end

-- Its permits and its capacity.
local function size(record)
  return tonumber(string.sub(record, 63, 72)), tonumber(string.sub(record, 74, 83))
end

local function with_expiry(record, ends)
  return string.sub(record, 1, 16) .. string.format('%013d', ends) .. string.sub(record, 30)
end

local function id_of(record)
  return string.sub(record, 30, 61)
end

-- Tells a ticket's client, and returns how many connections hear it, or nil and the error: it raises none, as
-- whoever is told of has to be written down by then. Only connections of this server are to hear it: a
-- script's PUBLISH is replicated, also one that reaches nobody here. A waiter whose connection stayed at a
-- master that was demoted would hear there of a grant that is cut short here, and believe in it for its whole
-- ttl, beside the next. A message that is not replicated is heard by the connections that are counted, and by
-- no other.
local function tell(key, record, message)
  local channel = string.match(key, '^[^{]*') .. 'wake:' .. string.match(record, '^%x+', 85)
  redis.set_repl(redis.REPL_NONE)
  local heard = redis.pcall('PUBLISH', channel, id_of(record) .. ' ' .. message)
  redis.set_repl(redis.REPL_ALL)
  if type(heard) == 'table' then return nil, heard end
  return heard
end

-- Tells it that the ticket holds.
local function tell_turn(key, record)
  return tell(key, record, string.format('%d', string.sub(record, 1, 16)))
end
