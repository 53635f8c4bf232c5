-- What the verbs share: the line of one name, where it is more than one ticket. It needs record.lua.
--
-- A name has up to three keys:
--   key        string   the state, which begins with the number drawn last, in 16 digits:
--                         '<last>'                           nobody is here
--                         '<record>'                         one holder, nobody waits; it has the last number
--                         '<last>L<marks:13><head:13><next:13><out:10><capacity:10><record>'
--                                                            one holder, with a line behind it
--                         the same without the record        several hold, or nobody
--                       marks: until when (ms) an id may have been released before it came; head, next: the
--                       place of the first who waits, and of the next to come; out: permits that are held
--   key:line   hash     place (13 digits) -> record, and id -> place, of those who wait;
--                       id -> record, of those who hold if they are several
--   key:ends   sorted   id by when it expires, of those who hold if they are several
-- and key:gone:<id>, the mark that an id was released before its enqueue came.
--
-- So no verb looks at more tickets than it lets in or finds dead. Places in line are given in order of the
-- numbers. A place whose ticket has gone stays empty.
--
-- The state is the truth about who holds: without it nobody does, whatever lies under the other keys, and a
-- new line begins without them. A holder is renewed only if its grant is found in the state, or in the hash
-- that the state refers to. key:ends is made anew from the hash.

local DAY_MS = 86400000

-- Reads the state of a name from the value of its key. An error reply if this library has not written it.
local function read(key, was, now)
  local foreign = 'WRONGTYPE ' .. key .. ' holds something else than the state of a lock'
  if was and (#was < 16 or string.find(string.sub(was, 1, 16), '%D')) then return redis.error_reply(foreign) end
  local line = {
    key = key, rows = key .. ':line', ends = key .. ':ends', now = now, was = was,
    last = was and string.sub(was, 1, 16) or '0000000000000000',
    marks = 0, head = 1, next = 1, out = 0, capacity = 0,
    -- Whether what lies under the other keys is of this line.
    is_line = false,
    -- Records of those who were let in and have not been told.
    let_in = {},
    -- Ids whose reply says that they hold, and for how long.
    renewed = {},
    -- Ids of those who were taken out because their time is over.
    dead = {},
  }
  if not was or #was == 16 then return line end
  if string.byte(was, 17) ~= 76 then
    line.solo = was
    line.out, line.capacity = size(was)
  else
    line.is_line = true
    line.marks, line.head = tonumber(string.sub(was, 18, 30)), tonumber(string.sub(was, 31, 43))
    line.next, line.out = tonumber(string.sub(was, 44, 56)), tonumber(string.sub(was, 57, 66))
    line.capacity = tonumber(string.sub(was, 67, 76))
    if #was > 76 then line.solo = string.sub(was, 77) end
  end
  local record = line.solo
  if not (line.out and line.capacity and line.marks and line.head and line.next)
    or record and (not end_of(record) or string.byte(record, 62) ~= 58) then -- ':'
    return redis.error_reply(foreign)
  end
  return line
end

-- Before anything is put under the other keys.
local function begin(line)
  if line.is_line then return end
  redis.call('DEL', line.rows, line.ends)
  line.is_line, line.raise = true, true
end

-- Puts down what read() has read, with what has become of it since.
local function write(line)
  local nobody, waits = line.out == 0, line.head < line.next
  -- None, so that the short ways of enqueue.lua and release.lua are open again.
  if line.marks <= line.now then line.marks = 0 end
  if nobody and not line.was and line.marks == 0 then return end
  local value
  if nobody and not waits and line.marks == 0 then
    value = line.last
  elseif line.solo and not waits and line.marks == 0 and string.sub(line.solo, 1, 16) == line.last then
    value = line.solo
  else
    begin(line)
    value = line.last .. string.format('L%013d%013d%013d%010d%010d',
      line.marks, line.head, line.next, line.out, line.capacity) .. (line.solo or '')
  end
  if value == line.was and not line.raise then return end
  local life = DAY_MS + math.max(0, tonumber(line.last) / 1000 - line.now)
  -- No number has been drawn, and there is nothing but a mark.
  if nobody and not line.was then life = line.marks - line.now end
  life = string.format('%d', life)
  redis.call('SET', line.key, value, 'PX', life)
  line.was = value
  -- A key's life ends a day after the last request that was here to stay, so that no short ttl can end it
  -- under a ticket with a long one. Only a clock that is put back by 12 hours or more, and then forward
  -- again, can.
  if line.raise and line.is_line then
    redis.call('PEXPIRE', line.rows, life)
    if not line.solo then redis.call('PEXPIRE', line.ends, life) end
  end
  line.raise = nil
end

-- The record of a ticket, and its place in line if it waits.
local function find(line, id)
  if line.solo and id_of(line.solo) == id then return line.solo end
  local found = line.is_line and redis.call('HGET', line.rows, id)
  if not found then return nil end
  -- A record under an id is of one of several holders; of nobody, if the state knows of no such.
  if #found > 13 then return not line.solo and line.out > 0 and found or nil end
  -- A place that others have passed is nobody's, whatever a denied HDEL has left there; nor is one that is empty.
  local place = tonumber(found)
  local record = place >= line.head and place < line.next and redis.call('HGET', line.rows, found)
  if record and id_of(record) == id then return record, found end
end

-- When it expires, as key:ends has it.
local function score(record)
  return string.format('%d', end_of(record))
end

-- After each change of the ends. One that was denied stops nothing, as they are made anew from the rows: see
-- put_down.
local function note(line, answer)
  if type(answer) ~= 'table' then return end
  line.torn, line.denied = true, line.denied or answer
end

-- Writes the record of a ticket that is there.
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

-- How many tickets there are.
local function count(line)
  local holders = line.solo and 1 or 0
  local rows = redis.call('HLEN', line.rows)
  if not line.solo and line.out > 0 then holders = redis.call('ZCARD', line.ends); rows = rows - holders end
  return holders + rows / 2
end

-- Before a key is made that is given its life when all is written: if that is denied, the key would stay for ever.
-- Changes nothing, as no mark has an empty id.
local function may_live(line)
  redis.call('PEXPIRE', line.key .. ':gone:', '1')
end

local function append(line, id, record)
  begin(line)
  if line.head == line.next then line.raise = true end -- nobody else may be in the hash
  if line.raise then may_live(line) end
  local place = string.format('%013d', line.next)
  redis.call('HSET', line.rows, place, record, id, place)
  line.next = line.next + 1
end

-- Closes the gaps of a line, if there are many.
local function compact(line)
  -- Places that are empty have to be passed over when their turn comes, so they are not to become many more than
  -- those who wait.
  local places = line.next - line.head
  if places < 256 then return end
  local waiting = count(line)
  if places < 2 * waiting + 128 then return end
  local rows, taken = redis.call('HGETALL', line.rows), {}
  for i = 1, #rows, 2 do
    if #rows[i] == 13 and tonumber(rows[i]) >= line.head then taken[#taken + 1] = { rows[i], rows[i + 1] } end
  end
  table.sort(taken, function(a, b) return a[1] < b[1] end)
  -- Nobody's new place is beyond its old one.
  for i, old in ipairs(taken) do
    local new = string.format('%013d', line.head + i - 1)
    if new ~= old[1] then
      redis.call('HSET', line.rows, new, old[2], id_of(old[2]), new)
      redis.call('HDEL', line.rows, old[1])
    end
  end
  line.next = line.head + #taken
end

-- Takes one who waits out of the line.
local function remove(line, place, id)
  redis.call('HDEL', line.rows, place, id)
  line.first = nil
  compact(line)
end

-- The record of the first who waits and lives. Those who died before it are removed.
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

-- Counts the permits of the holders, and makes their ends, anew from the records.
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

-- When the first of the holders expires; nil if nobody holds.
local function soonest(line)
  if line.out == 0 then return nil end
  if line.solo then return end_of(line.solo) end
  local ends = redis.call('ZRANGE', line.ends, '0', '0', 'WITHSCORES')[2]
  if not ends then
    recount(line) -- it was evicted
    ends = redis.call('ZRANGE', line.ends, '0', '0', 'WITHSCORES')[2]
  end
  return tonumber(ends)
end

-- Whether one of those who hold by key:ends has lost its record.
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

-- Removes the holders whose time is over.
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
  -- The hash was evicted, and with it who held how much. Until the last of them has expired, all that they held
  -- stays out: they may believe in their leases still.
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
  -- It may have been evicted. Asked before the row is written: a question that is denied after it would leave a row that
  -- the sum does not have.
  if not line.raise and redis.call('EXISTS', line.rows) == 0 then line.raise = true end
  if line.raise then may_live(line) end
  redis.call('HSET', line.rows, unpack(rows))
  line.solo, line.out = nil, line.out + permits
  note(line, redis.pcall('ZADD', line.ends, unpack(ends)))
end

-- Takes a holder out.
local function let_go(line, id, record)
  if line.solo then
    line.solo, line.out = nil, 0
    return
  end
  redis.call('HDEL', line.rows, id)
  line.out = line.out - size(record)
  note(line, redis.pcall('ZREM', line.ends, id))
end

-- A waiter that no connection listens for is given this long to come back and renew.
local UNHEARD_MS = 2000

-- The record of a grant that nobody has heard: a dead waiter is to cost two seconds and not its whole ttl.
local function cut_short(line, record)
  local ends = math.min(end_of(record), line.now + UNHEARD_MS)
  line.unheard = math.max(line.unheard or 0, ends)
  return with_expiry(record, ends)
end

-- Lets those in whose turn it is. All but the asker, whose reply says it, are to be told.
local function grant(line, asker)
  while true do
    local record = first(line)
    if not record then return end
    local permits, capacity = size(record)
    if line.out == 0 then line.capacity = capacity end
    if line.out + permits > line.capacity then return end
    local id, place = id_of(record), string.format('%013d', line.head)
    hold(line, id, record, permits)
    line.head, line.first = line.head + 1, nil
    if id == asker then
      line.asker_holds = true
    else
      line.let_in[#line.let_in + 1] = record
    end
    -- One of several has its record under its id by now.
    if line.solo then redis.call('HDEL', line.rows, place, id) else redis.call('HDEL', line.rows, place) end
  end
end

-- A holder's time ends, and nobody will tell those who wait behind it; the first in line knows when, but not
-- if it is the first only now, or the grant one that nobody heard. So the first of them that lives and hears
-- it, of the next few, is told now to look again then. One who asks is not, as its reply says it: see recheck.
local function look_again(line, asking)
  local ends = line.first_left and soonest(line) or line.unheard
  line.first_left, line.unheard = nil, nil
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

-- Does some work on a line, and puts down what has become of it: all of it, or what was done before a call was
-- denied, whose error this raises then. A right can be taken away between any two verbs, so a command may be
-- denied in the middle of one. What it leaves is safe, for these reasons:
--   the state can be written, as settle() has just done so. It says what the rows say, as a change is entered in
--     `line` only when its row is written;
--   one who is let in has its record among the holders before its place is emptied. If that is denied, the row
--     stays at a place that the line has passed, where nobody looks for it;
--   a change of the ends that is denied stops nothing. They are deleted here, and the next verb makes them and the
--     sum anew from the rows. If that is denied too, an end that is missing keeps permits until the others have
--     ended, and one that is too early is the one that its client believes in, whose renewal has failed;
--   a life that is not made longer is that of an earlier request, a day. No key is made if it could be given none.
-- So nobody holds whom the sum leaves out, no permit is lost for longer than a lease, and a verb that answered with
-- the error can be repeated. The client gives back what an enqueue may have left.
local function put_down(line, work)
  local done, result, more = pcall(work)
  if line.torn then redis.pcall('DEL', line.ends) end
  local written, reason = pcall(write, line)
  if not done then error(result, 0) end
  if not written then error(reason, 0) end
  return result, more
end

-- Does the work of a verb on a line, and tells those whom it concerns when all of it is written. One who was let
-- in is told by one message, to the channel of its client. If a message is denied, the first error is in
-- line.denied, as that of the ends is, and the one who was to hear it keeps its whole lease: its next renewal says that it holds.
-- `asking` has the ids that the reply is about.
local function settle(line, asking, work)
  -- Changes nothing, as the key is there. If it is refused or denied, nothing has been done; else the state can be
  -- written at the end. So a replica and a full server refuse every request for a lock: a replica may be behind, and
  -- neither will grant what it says to be held.
  if line.was then redis.call('SET', line.key, '', 'NX') end
  local result, more = put_down(line, work)
  put_down(line, function()
    for _, record in ipairs(line.let_in) do
      local id = id_of(record)
      -- One that was let in and then renewed by the same batch is told by the reply.
      if not line.renewed[id] then
        local heard, denied = tell_turn(line.key, record)
        line.denied = line.denied or denied
        if heard == 0 then change(line, nil, id, cut_short(line, record)) end
      end
    end
    look_again(line, asking)
  end)
  return result, more
end

-- How long until a ticket that waits may have moved up without a wake-up: -1 but for the first in line, and
-- for one that is to look again.
local function recheck(line, id)
  local record = first(line)
  if record and id_of(record) == id then
    local ends = soonest(line)
    if ends then return ends - line.now end
  end
  return line.again == id and line.again_in_ms or -1
end

-- The answer of a batch on a replica, in place of one for each ticket. Every write is refused there, also the
-- first for each name, so that nothing has been written and nobody been told.
local REPLICA = 'READONLY this server is a replica'

-- Whether that is why one of a batch failed.
local function is_replica(reason)
  return string.find(type(reason) == 'table' and reason.err or tostring(reason), 'READONLY', 1, true)
end
