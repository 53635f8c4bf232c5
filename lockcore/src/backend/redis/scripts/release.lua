-- Removes tickets and wakes whoever holds because of it.
--
-- KEYS  per ticket: tickets, queue, mark
-- ARGV  1 prefix of wake-up channels; then per ticket: id, ms to keep the mark
-- Reply per ticket: 1 it was there, 0 it was not, 2 failed for this ticket, it may be half done
--
-- The mark makes an enqueue that arrives later answer "released before"; 0 ms leaves none. The first
-- write removes, so that the script passes on a full server.

-- The common case: one ticket, nobody to hand over to, and nothing to remember.
if #ARGV == 3 and ARGV[3] == '0' and redis.call('ZCARD', KEYS[2]) <= 1 then
  local found = redis.call('ZREM', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[1], ARGV[2])
  return { found }
end

-- include line.lua

local now = clock()

local function release(tickets, queue, mark, id, mark_ms)
  local line = walk(tickets, queue, now, id, nil)
  local found = redis.call('ZREM', queue, id)
  redis.call('HDEL', tickets, id)
  settle(tickets, queue, now, line, ARGV[1], nil)
  if mark_ms ~= '0' then redis.call('SET', mark, '', 'PX', mark_ms) end
  return found
end

local reply = {}
for i = 2, #ARGV, 2 do
  local k = 3 * (i / 2 - 1)
  -- Whatever is wrong with one name must not keep the others locked.
  local done, found = pcall(release, KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[i], ARGV[i + 1])
  reply[#reply + 1] = done and found or 2
end
return reply
