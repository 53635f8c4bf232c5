-- Removes tickets and wakes whoever holds because of it.
--
-- KEYS  per ticket: the name's key; the others of a name are made from it, see line.lua
-- ARGV  per ticket: its id, and right behind it for how many ms to keep a mark, if one is to be left
-- Reply per ticket: 1 it was there, dead or not; 0 it was not; 2 failed for this ticket, it may be half done; 1 alone
--       for one ticket in the common cases; on a replica READONLY instead, and nothing is done
--
-- The mark makes an enqueue that arrives later answer "released before".
--
-- If the user is denied a command in the middle: alone, there is but one write. In the short way to the next in
-- line, the state is written first. From then on the next holds, and its renewal says so, though its row is not
-- removed, at a place that the line has passed, or the message not sent. The rest is argued at put_down() in
-- line.lua. A mark is written before the state that tells of it, and a release that failed is repeated.

local was = not KEYS[2] and redis.call('GET', KEYS[1])

-- The common case: it holds, and nobody waits. If it is dead, it keeps nobody out.
local last = was and string.sub(was, 30, 61) == ARGV[1] and string.sub(was, 1, 16)
if last and not redis.pcall('SET', KEYS[1], last, 'KEEPTTL').err then return 1 end

-- A full server refuses a SET, unless something was written before that it does not refuse.
local function put(value)
  redis.call('HDEL', KEYS[1] .. ':line', '')
  redis.call('SET', KEYS[1], value, 'KEEPTTL')
end
if last then
  put(last)
  return 1
end

-- include record.lua

local now = clock()

-- The next most common: it is the one holder, and the next, who lives, has to have the lock to itself. That
-- one did not hold, and does when this one has gone, whatever this one had.
local next
if was and string.byte(was, 17) == 76 and string.sub(was, 106, 137) == ARGV[1]
  and string.sub(was, 18, 30) == '0000000000000' then
  local rows, head = KEYS[1] .. ':line', string.sub(was, 31, 43)
  next = redis.call('HGET', rows, head)
  local all = next and string.sub(next, 63, 72)
  if next and all == string.sub(next, 74, 83) and end_of(next) > now then
    local after, value = string.format('%013d', head + 1), next
    if after ~= string.sub(was, 44, 56) or string.sub(next, 1, 16) ~= string.sub(was, 1, 16) then
      value = string.sub(was, 1, 30) .. after .. string.sub(was, 44, 56) .. all .. all .. next
    end
    if redis.pcall('SET', KEYS[1], value, 'KEEPTTL').err then put(value) end
    redis.call('HDEL', rows, head, id_of(next))
    local heard = tell_turn(KEYS[1], next)
    if heard ~= 0 then return heard and 1 or 2 end
    was = value
  else
    next = nil
  end
end

-- include line.lua

if next then
  local line = read(KEYS[1], was, now)
  settle(line, {}, function() line.solo = cut_short(line, line.solo) end)
  return line.denied and 2 or 1
end

local function release(key, id, mark_ms)
  redis.call('HDEL', key .. ':line', '') -- changes nothing, and after it the rest passes on a full server
  local line = read(key, was or redis.call('GET', key), now)
  if line.err then return 2 end
  local found = settle(line, {}, function()
    bury(line)
    grant(line, id)
    local record, place = find(line, id)
    if place then
      local ahead = first(line)
      line.first_left = ahead and id_of(ahead) == id
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
  -- Whatever is wrong with one name must not keep the others locked.
  local done, found = pcall(release, key, id, mark_ms)
  if not done then
    if is_replica(found) then return redis.error_reply(REPLICA) end
    found = 2
  end
  reply[i] = found
end
return reply
