-- Prolongs tickets to a ttl from now, and lets none keep more permits than it is renewed with, which
-- wakes whoever holds because of it. Never creates one: a ticket that has expired, or been evicted, is
-- lost.
--
-- KEYS  per ticket: tickets, queue
-- ARGV  1 prefix of wake-up channels; then per ticket: id, permits, ttl in ms
-- Reply per ticket three numbers in a row:
--       0, ttl in ms, -1              holds
--       1, ttl in ms, recheck in ms   waits; -1: no recheck
--       2, -1, -1                     lost
--       3, -1, -1                     failed for this ticket, it may be half done
--       On a replica READONLY instead, and nothing is done.
--
-- Each ticket begins with a PEXPIREAT, after which the rest of the script passes on a full server.

-- include record.lua
-- include line.lua

local now = clock()

local function renew(tickets, queue, id, most, ttl)
  local known = redis.call('HMGET', tickets, id, 'last')
  local record = known[1]
  if not record then
    -- A replica, which may not have heard of it yet, refuses this too, and so does not say "lost".
    redis.call('HDEL', tickets, id)
    return 2, -1, -1
  end
  -- With nobody beside it, it holds if it lives.
  local alone = redis.call('HLEN', tickets) == 2
  keep(tickets, not alone and queue, now, tonumber(known[2] or '0'))
  local expires, permits = parse(record)
  local lives = expires > now
  -- Before anything is written: who is let in by it is found now or never.
  local line = not (lives and alone) and walk(tickets, queue, now, { asker = id, keeps = tonumber(most) })
  if lives then
    if permits + 0 > tonumber(most) then record = string.gsub(record, '^(%d+:%d+:)%d+', '%1' .. most) end
    redis.call('HSET', tickets, id, with_expiry(record, now + ttl))
  end
  if not line then return 0, ttl, -1 end
  settle(tickets, queue, now, line, ARGV[1], id)
  if not lives then return 2, -1, -1 end
  if line.asker then return 0, ttl, -1 end
  return 1, ttl, recheck(line, id, now)
end

local reply = {}
for i = 2, #ARGV, 3 do
  local k = 2 * (i - 2) / 3
  -- Whatever is wrong with one name must not cost the others their leases.
  local done, status, ttl, again = pcall(
    renew, KEYS[k + 1], KEYS[k + 2], ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]))
  if not done then
    if is_replica(status) then return redis.error_reply(REPLICA) end
    redis.set_repl(redis.REPL_ALL)
    status, ttl, again = 3, -1, -1
  end
  reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = status, ttl, again
end
return reply
