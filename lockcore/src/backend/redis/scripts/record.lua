-- The form in which a ticket is written, the clock that decides when it expires, and the message
-- that tells its client that it holds.
--
-- A record is: the ticket's number in 16 digits, its expiry in 13, its id in 32, then
-- ':permits:capacity:channel:owner', with permits and capacity in 10 digits each. So each field has
-- a fixed place, except for the end of the channel: number 1 to 16, expiry 17 to 29, id 30 to 61,
-- permits 63 to 72, capacity 74 to 83, channel from 85. A test in layout.rs checks that all scripts
-- use these places.
--
-- In front of the channel there may be '=' in place of ':'. It says that the client has chosen the
-- number. With ':', this server has assigned it. A client of a quorum asks several servers for one
-- ticket. The ticket's number is then the greatest number that is written with '='.
--
-- The expiry is a time of the server's clock in ms. If it begins with '+', it is counted in ms from
-- the ticket's number. In this form the number is the time of the grant, in microseconds of the
-- server's clock. So a new ticket can be written as the client has sent it.

-- Server time in milliseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns when the ticket expires, in ms of the server's clock. Returns nil if the record is not
-- from this library. The record begins behind the first `at` bytes of the text.
local function end_of(record, at)
  at = at or 0
  local ends = tonumber(string.sub(record, at + 17, at + 29))
  if string.byte(record, at + 17) ~= 43 then return ends end -- '+'
  local number = tonumber(string.sub(record, at + 1, at + 16))
  return ends and number and (number - number % 1000) / 1000 + ends
end

-- The ticket's permits and its capacity.
local function size(record)
  return tonumber(string.sub(record, 63, 72)), tonumber(string.sub(record, 74, 83))
end

local function with_expiry(record, ends)
  return string.sub(record, 1, 16) .. string.format('%013d', ends) .. string.sub(record, 30)
end

local function id_of(record)
  return string.sub(record, 30, 61)
end

-- Sends a message to the client of a ticket. Returns how many connections have received it, or nil
-- and the error. It raises no error, because what the message says is already written.
--
-- The message is not replicated, so only connections of this server receive it. By default a
-- PUBLISH in a script is replicated, even if no connection here receives it. That would be unsafe
-- for a waiter whose connection has stayed at a demoted master, which is now a replica of this
-- server. No connection is counted here, so the grant is cut short here. But the waiter would
-- receive the message at the demoted master. It would believe in the grant for its whole ttl, while
-- the next waiter holds too. A message that is not replicated reaches exactly the connections that
-- are counted.
--
-- In a cluster the channel ends with a hash tag, so with '}', and is in the slot of the key. The
-- replicas of this server pass such a message on all the same. So clients believe a message only if
-- it comes from the server that serves the slot.
local function tell(key, record, message)
  local channel = string.match(key, '^[^{]*') .. 'wake:' .. string.match(record, '^[^:]+', 85)
  local text, heard = id_of(record) .. ' ' .. message
  redis.set_repl(redis.REPL_NONE)
  if string.find(channel, '}', 1, true) then
    heard = redis.pcall('SPUBLISH', channel, text)
  else
    heard = redis.pcall('PUBLISH', channel, text)
  end
  redis.set_repl(redis.REPL_ALL)
  if type(heard) == 'table' then return nil, heard end
  return heard
end

-- Tells the client that the ticket holds.
local function tell_turn(key, record)
  return tell(key, record, string.format('%d', string.sub(record, 1, 16)))
end
