-- Removes tickets. Sends wake-ups to the waiters that hold because of the removal.
--
-- KEYS  per ticket: the name's key; the name's other keys are made from it, see line.lua
-- ARGV  per ticket: its id; if a mark is needed, directly behind it how many ms to keep the mark
-- Reply per ticket: 1 it was there, expired or not
--                   0 it was not there
--                   2 the release of this ticket has failed, and may be half done
--       If there is only one ticket, the reply is this number alone and no list.
--       On a replica the reply is the error READONLY, and nothing is done.
--
-- If an enqueue with a marked id arrives later, its reply is "released before".
--
-- If the user is denied a command in the middle:
-- - For a holder without waiters there is only one write.
-- - A short cut that grants the next waiter writes the state first. From then on this waiter holds,
--   and its renewal says so. That is true even if its row is not removed or the message is not
--   sent. (That row is in front of `head`, where no verb looks for it.)
-- - A short cut that removes a waiter removes its row first. If the state is not written after
--   that, the place is empty, and later verbs skip it.
-- - The other cases are explained at put_down() in line.lua.
-- - A mark is written before the state that refers to it.
--
-- The client repeats a release that failed.

-- What is known of the ticket's name: its state. With several tickets, each is read in its turn.
local was = not KEYS[2] and redis.call('GET', KEYS[1])

-- The most frequent case: a holder without waiters. The script does not check whether it has
-- expired: an expired holder keeps nobody out.
if was and string.sub(was, ID, ID_END) == ARGV[1] then
  local last = string.sub(was, LAST, LAST_END)
  if redis.pcall('SET', KEYS[1], last, 'KEEPTTL').err then
    -- A full server refuses a SET, unless the script has begun with a write that a full server
    -- accepts, such as this HDEL.
    redis.call('HDEL', KEYS[1] .. ':line', '')
    redis.call('SET', KEYS[1], last, 'KEEPTTL')
  end
  return 1
end

-- include record.lua

-- One reading of the clock decides everything, because time goes on while a script runs.
local now

-- What a short cut has left to the code below, because no connection has received its message.
local unheard

-- The replies for the tickets that were released so far.
local reply = {}

-- Writes the state.
local function put(key, value)
  if redis.pcall('SET', key, value, 'KEEPTTL').err then
    redis.call('HDEL', key .. ':line', '') -- as above
    redis.call('SET', key, value, 'KEEPTTL')
  end
  was = value
end

local function time()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Tells a waiter that it holds, and returns the reply.
local function wake(key, record)
  local heard = tell(key, record)
  if heard == 0 then unheard = sub(record, ID, ID_END) end
  return heard and 1 or 2
end

-- The short cuts for a ticket that is the only holder. If others wait, the one at this place gets the
-- lock. It has not expired, and it asks for all permits. So it cannot hold beside any other ticket,
-- and is granted however many permits the released ticket had.
local function hand_over(key, id, place)
  if sub(was, ID, ID_END) == id then -- nobody waits, as above
    put(key, sub(was, LAST, LAST_END))
    return 1
  end
  if sub(was, FORM, MARKS_END) ~= 'L0000000000000' or sub(was, SOLO_ID, SOLO_ID_END) ~= id then return end
  local rows, next = key .. ':line', sub(was, NEXT, NEXT_END)
  place = place or sub(was, HEAD, HEAD_END)
  local record = redis.call('HGET', rows, place)
  local all = record and sub(record, PERMITS, PERMITS_END)
  now = now or time()
  if not record or all ~= sub(record, CAPACITY, CAPACITY_END) or end_of(record) <= now then return end
  local after, value = string.format('%013d', place + 1), record
  if after ~= next or sub(record, NUMBER, NUMBER_END) ~= sub(was, LAST, LAST_END) then
    value = sub(was, LAST, MARKS_END) .. after .. next .. all .. all .. record
  end
  put(key, value)
  redis.call('HDEL', rows, place, sub(record, ID, ID_END))
  return wake(key, record)
end

-- Releases tickets in order, as long as there is a short cut.
local function take(short_cut)
  for i = #reply + 1, #KEYS do
    local key = KEYS[i]
    was = was or redis.call('GET', key)
    local done, found = pcall(short_cut, key, ARGV[i])
    if not done then was = nil end
    if not done or not found or unheard then return end
    reply[i], was = found, nil
  end
end

take(hand_over)
if #reply == #KEYS then return KEYS[2] and reply or reply[1] end

-- Returns the first row at this place or behind it, and the row's place. Without such a row, the
-- place is that of the next waiter to come. The place is nil if there are many empty places.
local function row_from(rows, place, next)
  if place == next then return nil, next end
  local record = redis.call('HGET', rows, place)
  if record then return record, place end
  local places = {}
  for behind = place + 1, math.min(place + 16, next - 1) do places[#places + 1] = string.format('%013d', behind) end
  if #places == 0 then return nil, next end
  for i, record in ipairs(redis.call('HMGET', rows, unpack(places))) do
    if record then return record, places[i] end
  end
  if #places < 16 then return nil, next end
end

-- One of several holders leaves, and no other ticket expires. If the first waiter fits now, it gets
-- its permits. Then no permits are left, or nobody waits any more.
local function hand_on(key, id, record, first, rows, head, next)
  local out, ends, after, let_in = sub(was, OUT, OUT_END) - sub(record, PERMITS, PERMITS_END), key .. ':ends', head
  if head ~= next then
    local soonest = redis.call('ZRANGE', ends, '0', '0', 'WITHSCORES')[2]
    if not soonest or tonumber(soonest) <= now or not first or end_of(first) <= now or out == 0 then return end
    local sum, capacity = out + sub(first, PERMITS, PERMITS_END), tonumber(sub(was, OF, OF_END))
    if sum <= capacity then
      after = string.format('%013d', head + 1)
      if sum < capacity and after ~= next then return end
      out, let_in = sum, sub(first, ID, ID_END)
    end
  end
  if out < 0 then return end
  local value = sub(was, LAST, LAST_END)
  if out > 0 then value = sub(was, LAST, MARKS_END) .. after .. next .. string.format('%010d', out) .. sub(was, OF) end
  redis.call('HDEL', rows, '') -- checks that the user may call it; a full server then accepts the rest
  redis.call('SET', key, value, 'KEEPTTL')
  local denied = let_in and redis.pcall('HSET', rows, let_in, first)
  if type(denied) == 'table' then
    redis.call('SET', key, was, 'KEEPTTL')
    return
  end
  was = value
  redis.call('HDEL', rows, id, let_in and head or id)
  denied = redis.pcall('ZREM', ends, id)
  if let_in and type(denied) ~= 'table' then
    denied = redis.pcall('ZADD', ends, string.format('%d', end_of(first)), let_in)
  end
  if type(denied) == 'table' then redis.pcall('DEL', ends) end -- as in put_down() in line.lua
  local told = let_in and wake(key, first) or 1
  return type(denied) == 'table' and 2 or told
end

-- A waiter leaves a line. Neither the holders nor the first waiter have expired. So nobody gets the
-- lock, unless the first waiter leaves while there are free permits.
local function leave(key, id, place, first, rows, head, next)
  if place < head or place >= next or not first or end_of(first) <= now then return end
  local ends = #was > OF_END and end_of(was, OF_END)
    or tonumber(redis.call('ZRANGE', key .. ':ends', '0', '0', 'WITHSCORES')[2])
  if not ends or ends <= now then return end
  -- If this leaves too many empty places, compact() in line.lua is needed.
  if next - head >= 256 and next - head >= redis.call('HLEN', rows) + 128 then return end
  if place ~= head then
    local record = redis.call('HGET', rows, place)
    if not record or sub(record, ID, ID_END) ~= id then return end
    redis.call('HDEL', rows, place, id)
    return 1
  end
  if sub(was, OUT, OUT_END) ~= sub(was, OF, OF_END) or sub(first, ID, ID_END) ~= id then return end
  local behind, at = row_from(rows, string.format('%013d', head + 1), next)
  if not at or behind and end_of(behind) <= now then return end
  redis.call('HDEL', rows, place, id)
  put(key, sub(was, LAST, MARKS_END) .. at .. sub(was, NEXT))
  -- The waiter that is the first now does not know when to recheck: see look_again() in line.lua.
  local heard = not behind or tell(key, behind, string.format('again %d', ends - now + 10))
  if heard == 0 then unheard = 'again' end
  return heard and 1 or 2
end

-- All short cuts. Returns the reply for a ticket, or nil. If it returns nil, it has done nothing.
local function short_cut(key, id)
  local found = hand_over(key, id)
  -- A line without marks and without a stored capacity.
  if found or sub(was, FORM, MARKS_END) ~= 'L0000000000000' then return found end
  local rows, head, next = key .. ':line', sub(was, HEAD, HEAD_END), sub(was, NEXT, NEXT_END)
  if sub(was, SOLO_ID, SOLO_ID_END) == id then
    local _, place = row_from(rows, head, next) -- passes over empty places
    return place and place ~= head and hand_over(key, id, place)
  end
  now = now or time()
  local known = redis.call('HMGET', rows, id, head)
  local found, first = known[1], known[2]
  if not found then return end
  if #found == 13 then return leave(key, id, found, first, rows, head, next) end
  -- With a single holder, the record is a leftover: see find() in line.lua.
  if #was == OF_END then return hand_on(key, id, found, first, rows, head, next) end
end

take(short_cut)
if #reply == #KEYS then return KEYS[2] and reply or reply[1] end

-- include line.lua

now = now or time()

local function release(key, id, mark_ms)
  if not unheard then redis.call('HDEL', key .. ':line', '') end -- changes nothing; a full server then accepts the rest
  local line = read(key, was or redis.call('GET', key), now)
  if line.err then return 2 end
  -- May refuse the request if the slot is being moved. Nothing has been done until now.
  if mark_ms then is_marked(line, id) end
  if unheard then
    settle(line, {}, function()
      if unheard == 'again' then line.tells_first = true return end
      change(line, nil, unheard, cut_short(line, (find(line, unheard))))
    end)
    return line.denied and 2 or 1
  end
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

for i = #reply + 1, #KEYS do
  local id, mark_ms = string.sub(ARGV[i], LEAVING, LEAVING_END), #ARGV[i] > LEAVING_END and string.sub(ARGV[i], LEAVING_MARK)
  -- An error for one name must not keep other names locked.
  local done, found = pcall(release, KEYS[i], id, mark_ms)
  if not done then
    if is_replica(found) then return redis.error_reply(REPLICA) end
    found = 2
  end
  reply[i], was, unheard = found, nil, nil
end
return KEYS[2] and reply or reply[1]
