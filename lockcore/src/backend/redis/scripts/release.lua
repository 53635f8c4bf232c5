-- Removes tickets. Sends wake-ups to the waiters that hold because of the removal.
--
-- KEYS  per ticket: the name's key; the name's other keys are made from it, see line.lua
-- ARGV  per ticket: its id; if a mark is needed, directly behind it how many ms to keep the mark
-- Reply per ticket: 1 it was there, expired or not
--                   0 it was not there
--                   2 the release of this ticket has failed, and may be half done
--       In the fast paths for one ticket, the reply is this number alone and no list.
--       On a replica the reply is the error READONLY, and nothing is done.
--
-- If an enqueue with a marked id arrives later, its reply is "released before".
--
-- If the user is denied a command in the middle:
-- - For a holder without waiters there is only one write.
-- - The fast path that grants the next waiter writes the state first. From then on this waiter
--   holds, and its renewal says so. That is true even if its row is not removed or the message is
--   not sent. (That row is in front of `head`, where no verb looks for it.)
-- - The other cases are explained at put_down() in line.lua.
-- - A mark is written before the state that refers to it.
--
-- The client repeats a release that failed.

local was = not KEYS[2] and redis.call('GET', KEYS[1])

-- The most frequent case: a holder without waiters. The script does not check whether it has
-- expired: an expired holder keeps nobody out.
if was and string.sub(was, 30, 61) == ARGV[1] then
  local last = string.sub(was, 1, 16)
  if redis.pcall('SET', KEYS[1], last, 'KEEPTTL').err then
    -- A full server refuses a SET, unless the script has begun with a write that a full server
    -- accepts, such as this HDEL.
    redis.call('HDEL', KEYS[1] .. ':line', '')
    redis.call('SET', KEYS[1], last, 'KEEPTTL')
  end
  return 1
end

-- include record.lua

-- The next most frequent case: the ticket is the only holder, and the first waiter has not expired
-- and asks for all permits. This waiter cannot hold beside any other ticket. So it is granted now,
-- however many permits the released ticket had.
local next, now
if was and sub(was, 17, 30) == 'L0000000000000' and sub(was, 106, 137) == ARGV[1] then
  local rows, head, time = KEYS[1] .. ':line', sub(was, 31, 43), redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  next = redis.call('HGET', rows, head)
  local all = next and sub(next, 63, 72)
  if next and all == sub(next, 74, 83) and end_of(next) > now then
    local after, behind, value = string.format('%013d', head + 1), sub(was, 44, 56), next
    if after ~= behind or sub(next, 1, 16) ~= sub(was, 1, 16) then
      value = sub(was, 1, 30) .. after .. behind .. all .. all .. next
    end
    if redis.pcall('SET', KEYS[1], value, 'KEEPTTL').err then
      redis.call('HDEL', rows, '') -- as above
      redis.call('SET', KEYS[1], value, 'KEEPTTL')
    end
    redis.call('HDEL', rows, head, sub(next, 30, 61))
    local heard = tell(KEYS[1], next)
    if heard ~= 0 then return heard and 1 or 2 end
    was = value
  else
    next = nil
  end
end

-- include line.lua

-- One reading of the clock decides everything, because time goes on while a script runs.
now = now or clock()

if next then
  local line = read(KEYS[1], was, now)
  settle(line, {}, function() line.solo = cut_short(line, line.solo) end)
  return line.denied and 2 or 1
end

local function release(key, id, mark_ms)
  redis.call('HDEL', key .. ':line', '') -- changes nothing; a full server then accepts the rest
  local line = read(key, was or redis.call('GET', key), now)
  if line.err then return 2 end
  -- May refuse the request if the slot is being moved. Nothing has been done until now.
  if mark_ms then is_marked(line, id) end
  local found = settle(line, {}, function()
    bury(line)
    grant(line, id)
    local record, place = find(line, id)
    if place then
      local ahead = first(line)
      line.tells_first = ahead and id_of(ahead) == id
      remove(line, place, id)
    elseif record then
      let_go(line, id, record)
    end
    grant(line, id)
    if mark_ms then
      redis.call('SET', key .. ':gone:' .. id, '', 'PX', mark_ms)
      line.marks = math.max(line.marks, now + mark_ms)
    end
    return (record or line.dead[id]) and 1 or 0
  end)
  return line.denied and 2 or found
end

local reply = {}
for i, key in ipairs(KEYS) do
  local id, mark_ms = string.sub(ARGV[i], 1, 32), #ARGV[i] > 32 and string.sub(ARGV[i], 33)
  -- An error for one name must not keep other names locked.
  local done, found = pcall(release, key, id, mark_ms)
  if not done then
    if is_replica(found) then return redis.error_reply(REPLICA) end
    found = 2
  end
  reply[i] = found
end
return reply
