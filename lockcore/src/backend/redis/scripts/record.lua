-- A ticket as it is written, 'expires_ms:number:permits:capacity:channel:owner', the clock that it is
-- judged by, and how its client learns that it holds.

-- A waiter that no connection listens for is given this long to come back and renew.
local UNHEARD_MS = 2000

-- Server time in milliseconds.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- When it expires, as a number; permits and capacity as they are written.
local function parse(record)
  local expires, permits, capacity = string.match(record, '^(%d+):%d+:(%d+):(%d+):')
  return tonumber(expires), permits, capacity
end

-- The record with another expiry; the rest stays.
local function with_expiry(record, expires)
  return string.format('%d', expires) .. string.sub(record, string.find(record, ':', 1, true), -1)
end

-- Tells a client, and returns how many connections hear it. Only those of this server are to: a script's
-- PUBLISH is replicated, also one that reaches nobody here. A waiter whose connection stayed at a master
-- that was demoted would hear there of a grant that is cut short here, and believe in it for its whole ttl,
-- beside the next. A message that is not replicated is heard by the connections that are counted, and
-- by no other. When this fails, a batch that goes on must replicate again: see renew.lua, release.lua.
local function tell(channel, message)
  redis.set_repl(redis.REPL_NONE)
  local heard = redis.call('PUBLISH', channel, message)
  redis.set_repl(redis.REPL_ALL)
  return heard
end

-- Tells a ticket's client that it holds: one message, to the channel of that client. A grant that nobody
-- hears is cut short, so that a dead waiter costs two seconds and not its whole ttl; returns when it ends.
local function wake(tickets, id, record, now, prefix)
  local expires, number, channel = string.match(record, '^(%d+):(%d+):%d+:%d+:(%x+):')
  if tell(prefix .. channel, id .. ' ' .. number) > 0 then return nil end
  local ends = math.min(tonumber(expires), now + UNHEARD_MS)
  redis.call('HSET', tickets, id, with_expiry(record, ends))
  return ends
end
