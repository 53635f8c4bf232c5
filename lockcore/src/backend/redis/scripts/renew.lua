-- Prolongs tickets to their ttl from now. Never creates one: a ticket that has expired, or that
-- eviction took out of one of its two keys, is lost.
--
-- KEYS  per ticket: tickets, queue
-- ARGV  1 prefix of wake-up channels; then per ticket: id
-- Reply per ticket three numbers in a row:
--       0, ttl in ms, -1              holds
--       1, ttl in ms, recheck in ms   waits; -1: no recheck
--       2, -1, -1                     lost
--
-- Each ticket begins with a PEXPIREAT, after which the rest of the script passes on a full server.

local reply = {}
local now = clock()
for i = 2, #ARGV do
  local id, tickets, queue = ARGV[i], KEYS[2 * i - 3], KEYS[2 * i - 2]
  local status, ttl, again = 2, -1, -1
  local known = redis.call('HMGET', tickets, id, 'last')
  local record = known[1]
  if record and redis.call('ZSCORE', queue, id) then
    keep(tickets, queue, now, tonumber(known[2] or '0'))
    if parse(record) > now then
      local own_ttl = parse_rest(record)
      redis.call('HSET', tickets, id, with_expiry(record, now + own_ttl))
      status, ttl = 1, own_ttl
    end
    local line = walk(tickets, queue, now, nil, id)
    settle(tickets, queue, now, line, ARGV[1], id)
    if status == 1 then
      if line.asker then status = 0 else again = recheck(line, id, now) end
    end
  elseif record then
    redis.call('HDEL', tickets, id)
  end
  reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = status, ttl, again
end
return reply
