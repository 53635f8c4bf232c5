-- The functions that the verbs share. They work on the line of one name. The fast paths of the
-- verbs, for names with few tickets, do not need them.
--
-- A name has up to three keys (the places of the fields are in places.txt):
--   key        string   the state. It begins with the last number that was assigned, in 16 digits:
--                         '<last>'      no ticket
--                         '<record>'    one holder, no waiter; the holder has the last number
--                         '<last>L<marks:13><head:13><next:13><out:10><capacity:10><record>'
--                                       one holder, with a line behind it
--                         the same without the record
--                                       several holders, or none
--                         '<last>R…<capacity:10><stored:10><change:32><record>'
--                                       the same with R in place of L. This form is used whenever
--                                       a capacity is stored (resize.lua). Its key does not expire
--                       marks: until when (ms) a mark may exist; head: place of the first waiter;
--                       next: the place of the next waiter to come; out: permits that are held;
--                       stored: the capacity that counts in place of those of the tickets;
--                       change: the id of the last change of the stored capacity
--   key:line   hash     of each waiter: place (13 digits) -> record, and id -> place;
--                       of each holder, if there are several: id -> record
--   key:ends   sorted   of each holder, if there are several: its id, scored by when it expires
-- Beside these keys there may be marks. The key key:gone:<id> says that this id was released before
-- its enqueue came. The key key:gone:capacity says that a stored capacity was forgotten.
--
-- A place is a number for the position of a waiter in the line. Places are given in the order of
-- the tickets' numbers. When a waiter leaves the line, its place stays empty.
--
-- With these keys, a verb reads no more tickets than it grants or finds expired.
--
-- The state decides which tickets hold. If the state is lost, no ticket holds, whatever the other
-- keys contain. A new line then begins without their data. A holder is renewed only if it is in the
-- state, or in the hash while the state says that there are several holders. If key:ends is lost,
-- it is made again from the hash.

-- include fields.lua

local DAY_MS = 86400000

-- Reads the state of a name from the value of its key. Returns an error reply if the value is not
-- from this library.
local function read(key, was, now)
  local foreign = 'WRONGTYPE ' .. key .. ' holds something else than the state of a lock'
  if was and (#was < LAST_END or string.find(string.sub(was, LAST, LAST_END), '%D')) then return redis.error_reply(foreign) end
  local line = {
    key = key, rows = key .. ':line', ends = key .. ':ends', now = now, was = was,
    last = was and string.sub(was, LAST, LAST_END) or '0000000000000000',
    marks = 0, head = 1, next = 1, out = 0, capacity = 0,
    -- Whether the data in the other keys belongs to this state. If not, it is left from an earlier
    -- one.
    is_line = false,
    -- Records of the waiters that were granted by this verb and have no wake-up yet.
    let_in = {},
    -- Ids of the tickets for which the reply says that they hold, and for how long.
    renewed = {},
    -- Ids of the tickets that were removed because they had expired.
    dead = {},
  }
  if not was or #was == LAST_END then return line end
  local is_resized = string.byte(was, FORM) == 82 -- 'R'
  if string.byte(was, FORM) ~= 76 and not is_resized then
    line.solo = was
    line.out, line.capacity = size(was)
  else
    line.is_line = true
    line.marks, line.head = tonumber(string.sub(was, MARKS, MARKS_END)), tonumber(string.sub(was, HEAD, HEAD_END))
    line.next, line.out = tonumber(string.sub(was, NEXT, NEXT_END)), tonumber(string.sub(was, OUT, OUT_END))
    line.capacity = tonumber(string.sub(was, OF, OF_END))
    if is_resized then
      line.stored, line.change = tonumber(string.sub(was, STORED, STORED_END)), string.sub(was, CHANGE, CHANGE_END)
      if #was > CHANGE_END then line.solo = string.sub(was, STORED_SOLO) end
    elseif #was > OF_END then
      line.solo = string.sub(was, SOLO)
    end
  end
  local record = line.solo
  if not (line.out and line.capacity and line.marks and line.head and line.next) or is_resized and not line.stored
    or record and (not end_of(record) or string.byte(record, BEFORE_PERMITS) ~= 58) then -- ':'
    return redis.error_reply(foreign)
  end
  -- While a slot of a cluster is moved to this node, its keys arrive one by one. A key that has not
  -- arrived looks like a key that does not exist. So this EXISTS asks about all keys that must be
  -- there. If one of them is missing, the server refuses the command (TRYAGAIN), and the client
  -- repeats the request. is_marked() does the same for marks.
  if ARGV[#ARGV] == 'asking' then
    if line.out > 0 and not line.solo then
      redis.call('EXISTS', key, line.rows, line.ends)
    elseif line.head < line.next then
      redis.call('EXISTS', key, line.rows)
    end
  end
  return line
end

-- Whether there is a mark for this id. While the slot is moved to this node of a cluster, a missing
-- mark may be at the old node. So EXISTS asks about two keys, and the server refuses it (TRYAGAIN)
-- if the mark is missing. Without this, a late enqueue would not see the mark. And a second mark,
-- written here, would block the move of the first one.
local function is_marked(line, id)
  if line.marks <= line.now then return false end
  local mark = line.key .. ':gone:' .. id
  if ARGV[#ARGV] == 'asking' then return redis.call('EXISTS', line.key, mark) == 2 end
  return redis.call('EXISTS', mark) == 1
end

-- Prepares the other keys. Called before the first write to one of them.
local function begin(line)
  if line.is_line then return end
  redis.call('DEL', line.rows, line.ends)
  line.is_line, line.raise = true, true
end

-- Writes the state with all changes since read().
local function write(line)
  local nobody, waits = line.out == 0, line.head < line.next
  -- No mark exists now. With 0 in this field, the fast paths of enqueue.lua and release.lua can be
  -- used again.
  if line.marks <= line.now then line.marks = 0 end
  if nobody and not line.was and line.marks == 0 and not line.stored then return end
  local value
  if line.stored then
    begin(line)
    value = line.last .. string.format('R%013d%013d%013d%010d%010d%010d%s',
      line.marks, line.head, line.next, line.out, line.capacity, line.stored, line.change) .. (line.solo or '')
  elseif nobody and not waits and line.marks == 0 then
    value = line.last
  elseif line.solo and not waits and line.marks == 0 and string.sub(line.solo, NUMBER, NUMBER_END) == line.last then
    value = line.solo
  else
    begin(line)
    value = line.last .. string.format('L%013d%013d%013d%010d%010d',
      line.marks, line.head, line.next, line.out, line.capacity) .. (line.solo or '')
  end
  if value == line.was and not line.raise then return end
  local life = DAY_MS + math.max(0, tonumber(line.last) / 1000 - line.now)
  -- No number was ever assigned: the state only says that a mark exists.
  if nobody and not line.was then life = line.marks - line.now end
  life = string.format('%d', life)
  -- A state with a stored capacity does not expire. If the capacity were lost, more tickets than
  -- allowed could hold.
  if line.stored then redis.call('SET', line.key, value) else redis.call('SET', line.key, value, 'PX', life) end
  line.was = value
  -- A key expires a day after the last request that took or renewed a ticket, whatever the ttl of
  -- that ticket. So a request with a short ttl cannot end the key while a ticket with a long ttl
  -- needs it. There is one exception: a clock that is put back by 12 hours or more and then forward
  -- again.
  if line.raise and line.is_line then
    redis.call('PEXPIRE', line.rows, life)
    if not line.solo then redis.call('PEXPIRE', line.ends, life) end
  end
  line.raise = nil
end

-- Returns the record of a ticket, and its place if it waits.
local function find(line, id)
  if line.solo and id_of(line.solo) == id then return line.solo end
  local found = line.is_line and redis.call('HGET', line.rows, id)
  if not found then return nil end
  -- A record under an id is the record of one of several holders. If the state has no such holders,
  -- the record is a leftover.
  if #found > 13 then return not line.solo and line.out > 0 and found or nil end
  -- A place in front of `head` is not in use. A denied HDEL may have left a row there. An empty
  -- place is not in use, either.
  local place = tonumber(found)
  local record = place >= line.head and place < line.next and redis.call('HGET', line.rows, found)
  if record and id_of(record) == id then return record, found end
end

-- When the ticket expires, as text for key:ends.
local function score(record)
  return string.format('%d', end_of(record))
end

-- Checks the result of a change of key:ends. If the change was denied, the verb continues, because
-- the ends are made again from the rows: see put_down().
local function note(line, answer)
  if type(answer) ~= 'table' then return end
  line.torn, line.denied = true, line.denied or answer
end

-- Overwrites the record of a ticket: a waiter at this place, or a holder.
local function change(line, place, id, record)
  if place then
    redis.call('HSET', line.rows, place, record)
    line.first = nil
  elseif line.solo then
    line.solo = record
  else
    redis.call('HSET', line.rows, id, record)
    note(line, redis.pcall('ZADD', line.ends, 'XX', score(record), id))
  end
end

-- Returns the record of a holder with a new lease. If the lease now ends earlier than before, the
-- first waiter is told.
local function prolong(line, record, ttl)
  local ends = line.now + ttl
  if ends < end_of(record) then line.tells_first = true end
  return with_expiry(record, ends)
end

-- The number of tickets: holders and waiters. A waiter has two fields in the hash.
local function count(line)
  local holders = line.solo and 1 or 0
  local rows = redis.call('HLEN', line.rows)
  if not line.solo and line.out > 0 then holders = redis.call('ZCARD', line.ends); rows = rows - holders end
  return holders + rows / 2
end

-- Checks, before a key is created, that the client may use PEXPIRE. The lifetime of a key is set
-- only at the end of the script. If PEXPIRE were denied there, the key would stay for ever. This
-- PEXPIRE fails first. If it is allowed, it changes nothing, because its key never exists: the key
-- of a mark is `…:gone:<id>`, and no id is empty.
local function may_live(line)
  redis.call('PEXPIRE', line.key .. ':gone:', '1')
end

local function append(line, id, record)
  begin(line)
  if line.head == line.next then line.raise = true end -- the hash may not exist yet
  if line.raise then may_live(line) end
  local place = string.format('%013d', line.next)
  redis.call('HSET', line.rows, place, record, id, place)
  line.next = line.next + 1
end

-- Gives the waiters new places without gaps, if many places are empty.
local function compact(line)
  -- Each empty place costs work when `head` reaches it. So there must not be many more empty places
  -- than waiters.
  local places = line.next - line.head
  if places < 256 then return end
  local waiting = count(line)
  if places < 2 * waiting + 128 then return end
  local rows, taken = redis.call('HGETALL', line.rows), {}
  for i = 1, #rows, 2 do
    if #rows[i] == 13 and tonumber(rows[i]) >= line.head then taken[#taken + 1] = { rows[i], rows[i + 1] } end
  end
  table.sort(taken, function(a, b) return a[1] < b[1] end)
  -- The order stays. The new place of a ticket is its old place or an earlier one.
  for i, old in ipairs(taken) do
    local new = string.format('%013d', line.head + i - 1)
    if new ~= old[1] then
      redis.call('HSET', line.rows, new, old[2], id_of(old[2]), new)
      redis.call('HDEL', line.rows, old[1])
    end
  end
  line.next = line.head + #taken
end

-- Removes a waiter from the line.
local function remove(line, place, id)
  redis.call('HDEL', line.rows, place, id)
  line.first = nil
  compact(line)
end

-- Returns the record of the first waiter that has not expired. Removes the expired waiters in front
-- of it.
local function first(line)
  if line.first then return line.first end
  local page = 1
  while line.head < line.next do
    local places = {}
    for place = line.head, math.min(line.head + page, line.next) - 1 do
      places[#places + 1] = string.format('%013d', place)
    end
    local records, dead = redis.call('HMGET', line.rows, unpack(places)), {}
    for i, place in ipairs(places) do
      local record = records[i]
      if record and end_of(record) > line.now then
        line.first = record
        break
      end
      if record then
        dead[#dead + 1] = place
        dead[#dead + 1] = id_of(record)
        line.dead[id_of(record)] = true
      end
      line.head = line.head + 1
    end
    if #dead > 0 then redis.call('HDEL', line.rows, unpack(dead)) end
    if line.first then return line.first end
    page = 128
  end
end

-- Counts the permits of the holders again and makes key:ends again. Both come from the records of
-- the holders.
local function recount(line)
  may_live(line)
  redis.call('DEL', line.ends)
  local rows, held, out = redis.call('HGETALL', line.rows), {}, 0
  for i = 1, #rows, 2 do
    local id, record = rows[i], rows[i + 1]
    if #id == 32 and #record > 13 then
      out = out + size(record)
      held[#held + 1] = record
    end
  end
  line.out, line.raise = out, true
  for _, record in ipairs(held) do
    note(line, redis.pcall('ZADD', line.ends, score(record), id_of(record)))
  end
end

-- Returns when the first of the holders expires, or nil if there is no holder.
local function soonest(line)
  if line.out == 0 then return nil end
  if line.solo then return end_of(line.solo) end
  local ends = redis.call('ZRANGE', line.ends, '0', '0', 'WITHSCORES')[2]
  if not ends then
    recount(line) -- key:ends was evicted or deleted
    ends = redis.call('ZRANGE', line.ends, '0', '0', 'WITHSCORES')[2]
  end
  return tonumber(ends)
end

-- Whether key:ends has a holder without a record.
local function some_unknown(line)
  local ids = redis.call('ZRANGE', line.ends, '0', '-1')
  for from = 1, #ids, 128 do
    local page = { unpack(ids, from, math.min(from + 127, #ids)) }
    for _, record in ipairs(redis.call('HMGET', line.rows, unpack(page))) do
      if not record then return true end
    end
  end
  return false
end

-- Removes the holders that have expired.
local function bury(line)
  local ends = soonest(line)
  if not ends or ends > line.now then return end
  if line.solo then
    line.dead[id_of(line.solo)] = true
    line.solo, line.out = nil, 0
    return
  end
  local now, all_known = string.format('%d', line.now), true
  while true do
    local ids = redis.call('ZRANGEBYSCORE', line.ends, '-inf', now, 'LIMIT', '0', '128')
    if #ids == 0 then break end
    local records = redis.call('HMGET', line.rows, unpack(ids))
    redis.call('HDEL', line.rows, unpack(ids))
    for i, record in ipairs(records) do
      if record then
        line.dead[ids[i]] = true
        line.out = line.out - size(record)
      else
        all_known = false
      end
    end
    note(line, redis.pcall('ZREM', line.ends, unpack(ids)))
    if line.torn then return end
  end
  -- If a holder has no record, the hash was evicted, and the permits of its holders are unknown.
  -- These holders may believe in their leases. So all of their permits stay counted in `out` until
  -- the last of these holders has expired.
  if not all_known and not some_unknown(line) then recount(line) end
end

-- Makes a ticket a holder.
local function hold(line, id, record, permits)
  if line.out == 0 then
    line.solo, line.out = record, permits
    return
  end
  begin(line)
  local rows, ends = { id, record }, { score(record), id }
  if line.solo then
    rows[3], rows[4] = id_of(line.solo), line.solo
    ends[3], ends[4] = score(line.solo), rows[3]
    line.raise = true
  end
  -- The hash may have been evicted. This EXISTS comes before the row is written. If it were denied
  -- after that, there would be a row whose permits are not in the sum.
  if not line.raise and redis.call('EXISTS', line.rows) == 0 then line.raise = true end
  if line.raise then may_live(line) end
  redis.call('HSET', line.rows, unpack(rows))
  line.solo, line.out = nil, line.out + permits
  note(line, redis.pcall('ZADD', line.ends, unpack(ends)))
end

-- Removes a holder.
local function let_go(line, id, record)
  if line.solo then
    line.solo, line.out = nil, 0
    return
  end
  redis.call('HDEL', line.rows, id)
  line.out = line.out - size(record)
  note(line, redis.pcall('ZREM', line.ends, id))
end

-- How long the grant of a waiter lasts if no connection receives its wake-up. A waiter that is
-- alive can reconnect in this time and renew.
local UNHEARD_MS = 2000

-- Returns the record with a shortened lease, for a grant whose wake-up no connection has received.
-- The waiter may be dead. If it is dead, the others wait for two seconds instead of its whole ttl.
local function cut_short(line, record)
  local ends = math.min(end_of(record), line.now + UNHEARD_MS)
  line.unheard = math.max(line.unheard or 0, ends)
  return with_expiry(record, ends)
end

-- Grants the lock to the waiters whose turn it is. Each of them needs a wake-up. The only exception
-- is `asker`, the ticket that the request is about: the reply says that it holds.
local function grant(line, asker)
  while true do
    local record = first(line)
    if not record then return end
    local permits, capacity = size(record)
    if line.out == 0 then line.capacity = capacity end
    if line.out + permits > (line.stored or line.capacity) then return end
    local id, place = id_of(record), string.format('%013d', line.head)
    hold(line, id, record, permits)
    line.head, line.first = line.head + 1, nil
    if id == asker then
      line.asker_holds = true
    else
      line.let_in[#line.let_in + 1] = record
    end
    -- If there are several holders now, the field of this id has the record. So only the place is
    -- deleted.
    if line.solo then redis.call('HDEL', line.rows, place, id) else redis.call('HDEL', line.rows, place) end
  end
end

-- When a holder expires, nothing sends a wake-up. So the first waiter must know when to recheck.
-- The replies to its own requests have told it, except in three cases:
-- - It has become the first only now.
-- - A holder has asked for a shorter lease (see prolong()).
-- - No connection has received the wake-up of the newest holder, so that grant was cut short.
--
-- In these cases this function sends a message that says when to recheck. It tries the waiters at
-- the next 16 places, and stops at the first one that has not expired and receives the message. If
-- it comes to a waiter that the request is about, it sends no message: the reply tells that waiter
-- (see recheck()).
local function look_again(line, asking)
  local ends = line.tells_first and soonest(line) or line.unheard
  line.tells_first, line.unheard = nil, nil
  if not ends or not first(line) then return end
  local places = {}
  for place = line.head, math.min(line.head + 16, line.next) - 1 do
    places[#places + 1] = string.format('%013d', place)
  end
  local in_ms = ends - line.now + 10
  for _, record in ipairs(redis.call('HMGET', line.rows, unpack(places))) do
    if record then
      if asking[id_of(record)] then
        line.again, line.again_in_ms = id_of(record), in_ms
        return
      end
      if end_of(record) > line.now then
        local heard, denied = tell(line.key, record, string.format('again %d', in_ms))
        line.denied = line.denied or denied
        if heard ~= 0 then return end
      end
    end
  end
end

-- Does some work on a line, and then writes the state. If a call in the work is denied, the state
-- is written all the same, with what was done before that call. Then the error of the call is
-- raised.
--
-- An operator can take a right away between any two verbs, so a command can be denied in the middle
-- of a verb. The line that the verb leaves behind is safe, for these reasons:
-- - The state can be written, because settle() has just sent a write for it. The state agrees with
--   the rows, because `line` is changed only after the row was written.
-- - If a waiter is granted, its record is first written among the holders, and then its place is
--   emptied. If emptying the place is denied, the row stays in front of `head`, where no verb looks
--   for it.
-- - If a change of key:ends is denied, the verb continues. This function deletes key:ends, and the
--   next verb makes it again from the rows, with the sum of permits.
-- - If that deletion is denied too, key:ends is wrong in one of two ways. If an end is missing, its
--   permits stay out until the other holders have ended. If an end is too early, it is the end that
--   the client believes in, because its renewal has failed.
-- - If the lifetime of a key is not prolonged, the lifetime from an earlier request counts, which
--   is a day. No key is created without the right to give it a lifetime.
--
-- So the sum of permits includes every holder, and no permit is lost for longer than a lease. A
-- verb that answered with the error can be repeated. The client releases what an enqueue may have
-- left.
local function put_down(line, work)
  local done, result, more = pcall(work)
  if line.torn then redis.pcall('DEL', line.ends) end
  local written, reason = pcall(write, line)
  if not done then error(result, 0) end
  if not written then error(reason, 0) end
  return result, more
end

-- Does the work of a verb on a line, and sends the messages after the state is written. A waiter
-- that was granted gets one message, on the channel of its client. `asking` has the ids of the
-- tickets that the request is about.
--
-- If a message is denied, line.denied has the error, as it has an error of key:ends. If there are
-- several errors, line.denied has the first. The waiter that misses the message keeps its whole
-- lease, and its next renewal says that it holds.
local function settle(line, asking, work)
  -- This SET changes nothing, because the key exists. If it is refused or denied, nothing has been
  -- done. If it passes, the state can be written at the end. So a replica and a full server refuse
  -- every request for a lock. This matters at a replica, because its data may be old. It could
  -- answer that a lock is held although the lock is free at the master.
  if line.was then redis.call('SET', line.key, '', 'NX') end
  local done, result, more = pcall(put_down, line, work)
  -- If the work was denied a command, the waiters that were granted before it get their messages
  -- all the same. A repetition of the verb finds that they hold, and sends none. Their grants are
  -- written: a verb that grants has a state, so the SET above has passed, and the state was written
  -- with it. So no message comes for a grant that is not there, and none comes twice.
  put_down(line, function()
    for _, record in ipairs(line.let_in) do
      local id = id_of(record)
      -- A waiter may be granted and then renewed in the same batch. It learns of the grant from the
      -- reply.
      if not line.renewed[id] then
        local heard, denied = tell(line.key, record)
        line.denied = line.denied or denied
        if heard == 0 then change(line, nil, id, cut_short(line, record)) end
      end
    end
    look_again(line, asking)
  end)
  if not done then error(result, 0) end
  return result, more
end

-- Returns after how many ms this waiter must recheck, or -1. No wake-up is sent when a holder's
-- lease ends. So the first waiter rechecks when the lease that ends first ends. A waiter that
-- look_again() has chosen rechecks at the time that look_again() has set. All others get -1.
local function recheck(line, id)
  local record = first(line)
  if record and id_of(record) == id then
    local ends = soonest(line)
    if ends then return ends - line.now end
  end
  return line.again == id and line.again_in_ms or -1
end

-- The answer to a whole batch on a replica, in place of an answer for each ticket. A replica
-- refuses every write, and the work on each name begins with a write. So nothing was written, and
-- no message was sent.
local REPLICA = 'READONLY this server is a replica'

-- Whether a ticket of a batch failed because this server is a replica.
local function is_replica(reason)
  return string.find(type(reason) == 'table' and reason.err or tostring(reason), 'READONLY', 1, true)
end
