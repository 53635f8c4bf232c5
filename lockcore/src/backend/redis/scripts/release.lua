-- Removes tickets and wakes whoever holds because of it.
--
-- KEYS  per ticket: tickets, queue, mark
-- ARGV  1 prefix of wake-up channels; then per ticket: id, ms to keep the mark
-- Reply per ticket: 1 it was there, 0 it was not
--
-- The mark makes an enqueue that arrives later answer "released before"; 0 ms leaves none. The first
-- write removes, so that the script passes on a full server.

local reply = {}
for i = 2, #ARGV, 2 do
  local k = 3 * (i / 2 - 1)
  local id, tickets, queue = ARGV[i], KEYS[k + 1], KEYS[k + 2]
  local now, line
  -- Alone there is nobody to hand over to.
  if redis.call('ZCARD', queue) > 1 then
    now = clock()
    line = walk(tickets, queue, now, id, nil)
  end
  reply[#reply + 1] = redis.call('ZREM', queue, id)
  redis.call('HDEL', tickets, id)
  if line then settle(tickets, queue, now, line, ARGV[1], nil) end
  if ARGV[i + 1] ~= '0' then redis.call('SET', KEYS[k + 3], '', 'PX', ARGV[i + 1]) end
end
return reply
