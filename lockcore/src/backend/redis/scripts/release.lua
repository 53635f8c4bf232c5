-- Removes tickets and wakes whoever holds because of it.
--
-- KEYS  per ticket: tickets, queue, mark
-- ARGV  1 prefix of wake-up channels; then per ticket: id, ms to keep the mark
-- Reply per ticket: 1 it was there, 0 it was not, 2 failed for this ticket, it may be half done; on a
-- replica READONLY instead, and nothing is done
--
-- The mark makes an enqueue that arrives later answer "released before"; 0 ms leaves none. The first
-- write removes, so that the script passes on a full server.

-- The common case: one ticket, which is all there is, and nothing to remember. If it has a queue, others
-- were in it before.
local alone = #ARGV == 3 and ARGV[3] == '0'
if alone and redis.call('HLEN', KEYS[1]) == 2 then
  local found = redis.call('HDEL', KEYS[1], ARGV[2])
  if found == 1 then redis.call('DEL', KEYS[2]) end
  return { found }
end

-- include record.lua

-- The next most common: it is the first, and the next, who lives, has to have the lock to itself. That one
-- did not hold, and does when this one has gone, whatever this one had.
local front = alone and redis.call('LRANGE', KEYS[2], '0', '1') or {}
local record = front[1] == ARGV[2] and front[2] and redis.call('HMGET', KEYS[1], front[2])[1]
local now = clock()
local found, unheard
if record then
  local expires, permits, capacity = parse(record)
  if permits == capacity and expires > now then
    found = redis.call('HDEL', KEYS[1], ARGV[2])
    redis.call('LPOP', KEYS[2])
    unheard = wake(KEYS[1], front[2], record, now, ARGV[1])
    if not unheard then return { found } end
  end
end

-- include line.lua

if unheard then
  look_again(KEYS[1], KEYS[2], now, ARGV[1], unheard)
  return { found }
end

local function release(tickets, queue, mark, id, mark_ms)
  local line = walk(tickets, queue, now, { leaving = id })
  local found = redis.call('HDEL', tickets, id)
  if mark_ms ~= '0' then redis.call('SET', mark, '', 'PX', mark_ms) end
  redis.call('LREM', queue, '1', id)
  settle(tickets, queue, now, line, ARGV[1], nil)
  return found
end

local reply = {}
for i = 2, #ARGV, 2 do
  local k = 3 * (i / 2 - 1)
  -- Whatever is wrong with one name must not keep the others locked.
  local done, found = pcall(release, KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[i], ARGV[i + 1])
  if not done then
    if is_replica(found) then return redis.error_reply(REPLICA) end
    redis.set_repl(redis.REPL_ALL)
    found = 2
  end
  reply[#reply + 1] = found
end
return reply
