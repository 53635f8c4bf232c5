-- The form in which a ticket is written, and the two functions that the fast paths for names with
-- waiters need: end_of() and tell(). The others are in fields.lua, because a script creates each of
-- its functions again whenever it runs.
--
-- A record is: the ticket's number in 16 digits, its expiry in 13, its id in 32, then
-- ':permits:capacity:channel:owner', with permits and capacity in 10 digits each. So each field has
-- a fixed place, except for the end of the channel. Scripts use the names of the places: see
-- places.txt.
--
-- In front of the channel there may be '=' in place of ':'. It says that the client has chosen the
-- number. With ':', this server has assigned it. A client of a quorum asks several servers for one
-- ticket. The ticket's number is then the greatest number that is written with '='. With '~', this
-- server has assigned the number, and the ticket lingers: its client is told when a line begins.
--
-- The expiry is a time of the server's clock in ms. If it begins with '+', it is counted in ms from
-- the ticket's number. In this form the number is the time of the grant, in microseconds of the
-- server's clock. Its first 13 digits are the same time in ms. So a new ticket can be written as the
-- client has sent it.

-- A local is found faster than a field of a global table.
local sub = string.sub

-- Returns when the ticket expires, in ms of the server's clock. Returns nil if the record has no
-- such fields. The record begins behind the first `at` bytes of the text.
local function end_of(record, at)
  at = at or 0
  local ends = tonumber(sub(record, at + EXPIRES, at + EXPIRES_END))
  if string.byte(record, at + EXPIRES) ~= 43 then return ends end -- '+'
  local granted = tonumber(sub(record, at + MILLIS, at + MILLIS_END))
  return ends and granted and granted + ends
end

-- Sends a message to the client of a ticket. Without a message, it sends the ticket's number, which
-- says that the ticket holds. Returns how many connections have received it, or nil and the error.
-- It raises no error, because what the message says is already written.
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
  local channel = string.match(key, '^[^{]*') .. 'wake:' .. string.match(record, '^[^:]+', CHANNEL)
  local text, heard = sub(record, ID, ID_END) .. ' ' .. (message or sub(record, NUMBER, NUMBER_END))
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
