-- Takes a ticket. If an earlier try with the same id has left a ticket, renews that ticket.
--
-- KEYS  1 the name's key; the name's other keys are made from it, see line.lua
-- ARGV  1 the record without its number, with '+' and the ttl in ms as the expiry: see record.lua
--       2 the highest ticket number that the client has seen, in 16 digits. A client of a quorum
--         sends a number that is ahead of the clocks of all nodes. So every node assigns the next
--         number, and by this the client has chosen it
--       3 '0' for a request that does not wait; absent for one that waits
--       last 'asking' if the slot of the name is being moved to this node of a cluster
-- Reply number of the ticket, as text            granted, for the ttl
--       {1, ticket, ttl in ms, recheck in ms}     waiting; -1: no recheck
--       {2, ms until the first holder expires}    busy, or too many waiters; -1: unknown
--       {3, capacity in use}                      another capacity is in use; or a capacity is
--                                                 stored, and the request is not for a semaphore
--       {4}                                       this id was released before, or has expired
--       {5}                                       ticket numbers are exhausted
--
-- If the ticket is the first to wait behind a single holder that lingers, or the request is refused
-- because of that holder alone, the script tells the client of the holder. If that is denied, the
-- linger ends by itself.
--
-- The script is atomic, as every script is. A full server refuses its first write, and so all of
-- it.
--
-- If the user is denied a command in the middle:
-- - For a name without tickets there is only one write.
-- - The fast path for a waiter writes the state first. If the row is then denied, the new place is
--   empty, and later verbs skip it. PEXPIRE is also called before the row is written. If PEXPIRE
--   were denied only after that, the row would stay for ever.
-- - The other cases are explained at put_down() in line.lua.
--
-- Text is compared and joined without conversion where possible, because a conversion to a number
-- and back takes longer. Numbers go to Redis as text made with '%d'. Redis itself does not convert
-- Lua numbers exactly, and '%.0f' takes longer. On a 32-bit server '%d' ends at 31 bits, so
-- rights.lua refuses such a server when a client connects.

local key = KEYS[1]
local was = redis.call('GET', key)
local time = redis.call('TIME')

-- Numbers only rise. A new number is greater than the last one of the name and than the one that
-- the client has seen (if that is at most a day ahead of the clock). It is not behind the server's
-- clock, either. In each of its forms the state
-- begins with the last number. So no grant, release or expiry makes the next number smaller, and
-- neither does a clock that is put back.
--
-- The server may lose the state, or lose its newest data and have an older state. Then the clock of
-- a single server is greater than every earlier number. (In a quorum, numbers are a tenth of a
-- second ahead of the clocks.) If the clock was put back as well, only the client can know a
-- greater number.
--
-- So the next number is nearly always the clock in microseconds. All of these numbers have 16
-- digits, so they are compared as text. The state begins with the last number, so `number > was` is
-- true if the number is greater than the last one.
local number = time[1] .. time[2]
if #time[2] < 6 then number = time[1] .. string.format('%06d', time[2]) end
local END_OF_NUMBERS = '9007199254740992'
local is_next = #number == NUMBER_END and number > ARGV[2] and number < END_OF_NUMBERS and (not was or number > was)

-- Keys live until a day after the clock has passed the last number. If the clock was put back, this
-- is later than a day from now. The lifetime is prolonged only once in a thousand seconds: the
-- numbers of a thousand seconds have the same first 7 digits. That is enough, because no ticket
-- lives longer than 12 hours.
local DAY_MS = '86400000'

-- The most frequent case: the name has no tickets. If the value is not from this library, read()
-- below refuses it.
if is_next and (not was or #was == LAST_END and string.find(was, '^%d+$')) then
  if was and string.sub(was, THOUSAND_S, THOUSAND_S_END) == string.sub(number, THOUSAND_S, THOUSAND_S_END) then
    redis.call('SET', key, number .. ARGV[1], 'KEEPTTL')
  else
    redis.call('SET', key, number .. ARGV[1], 'PX', DAY_MS)
  end
  return number
end

-- include record.lua

local micros = time[1] * 1000000 + time[2]
local now = (micros - micros % 1000) / 1000
local ttl, id = tonumber(sub(ARGV[1], ASKED_TTL, ASKED_TTL_END)), sub(ARGV[1], ASKED_ID, ASKED_ID_END)
local permits, capacity = sub(ARGV[1], ASKED_PERMITS, ASKED_PERMITS_END), sub(ARGV[1], ASKED_CAPACITY, ASKED_CAPACITY_END)
local rows, ends = key .. ':line', key .. ':ends'
local MOST_TICKETS, FULL = 10000, 1073741824

-- Whether the state has a line, and behind how many bytes it has the record of the only holder.
local in_line = was and string.byte(was, FORM) == 76 -- 'L'
local at = in_line and OF_END or 0

-- The next most frequent cases: one ticket holds or several do, none of the tickets that are looked
-- at has expired, and the new ticket waits, or holds beside several others. In all other cases this
-- block does nothing, and ends with a break. (A function would take a microsecond more: it would be
-- created again in every run, with all the locals that it uses.)
repeat
  if not is_next or not was or string.byte(was, FORM) == 82 then break end -- 'R'
  local out, of, first, next = sub(was, PERMITS, PERMITS_END), sub(was, CAPACITY, CAPACITY_END), '0000000000001', '0000000000001'
  if in_line then
    if sub(was, MARKS, MARKS_END) ~= '0000000000000' then break end -- there may be marks
    first, next, out, of = sub(was, HEAD, HEAD_END), sub(was, NEXT, NEXT_END), sub(was, OUT, OUT_END), sub(was, OF, OF_END)
  end
  if of ~= capacity then break end
  local is_new_day = sub(was, THOUSAND_S, THOUSAND_S_END) ~= sub(number, THOUSAND_S, THOUSAND_S_END)
  -- The holder that expires first. `soonest` is its id, if it is one of several.
  local until_ms, soonest
  if #was > at then
    until_ms = sub(was, at + ID, at + ID_END) ~= id and end_of(was, at)
  elseif not is_new_day then
    local found = redis.call('ZRANGE', ends, '0', '0', 'WITHSCORES')
    soonest, until_ms = found[1], tonumber(found[2])
  end
  if not until_ms or until_ms <= now then break end

  local record, sum = number .. ARGV[1], out + permits
  if first == next and sum <= tonumber(capacity) then
    if not soonest then break end
    local known = redis.call('HMGET', rows, id, soonest)
    if known[1] or not known[2] then break end
    redis.call('SET', key, number .. sub(was, FORM, NEXT_END) .. string.format('%010d', sum) .. capacity, 'KEEPTTL')
    local denied = redis.pcall('HSET', rows, id, record)
    if type(denied) == 'table' then
      redis.call('SET', key, was, 'KEEPTTL')
      return denied
    end
    denied = redis.pcall('ZADD', ends, string.format('%d', end_of(record)), id)
    if type(denied) ~= 'table' then return number end
    redis.pcall('DEL', ends) -- the next verb makes it again: see put_down() in line.lua
    return denied
  end
  if ARGV[3] == '0' then break end

  local value
  if in_line then
    local known = redis.call('HMGET', rows, id, first, soonest or id)
    if soonest and not known[3] then break end -- the rows were evicted
    if known[1] or first ~= next and not (known[2] and end_of(known[2]) > now) then break end
    if next - first + (soonest and out or 1) >= MOST_TICKETS then break end
    value = number .. sub(was, FORM, HEAD_END) .. string.format('%013d', next + 1) .. sub(was, OUT)
  else
    if redis.call('EXISTS', rows, ends) ~= 0 then break end
    value = number .. 'L000000000000000000000000010000000000002' .. out .. capacity .. was
  end
  if soonest or first ~= next and not is_new_day then
    redis.call('SET', key, value, 'KEEPTTL')
    redis.call('HSET', rows, next, record, id, next)
  else
    -- Both keys get a new lifetime. The first PEXPIRE only checks that the user may call it.
    redis.call('SET', key, value, 'PX', DAY_MS)
    redis.call('PEXPIRE', rows, DAY_MS)
    redis.call('HSET', rows, next, record, id, next)
    redis.call('PEXPIRE', rows, DAY_MS)
  end
  if first == next and not soonest and string.byte(was, at + MARK) == 126 then -- '~'
    tell(key, sub(was, at + 1), 'wanted')
  end
  return {1, number, ttl, first == next and until_ms - now or -1}
until true

-- include fields.lua

-- The server accepts a number that the client has seen if it is at most a day ahead of the clock.
-- Without this limit, one wrong clock would make the numbers of all clients too great.
local last, seen = was and tonumber(string.sub(was, LAST, LAST_END)) or 0, tonumber(ARGV[2])
local drawn = math.max(last + 1, micros)
local is_chosen = seen + 1 >= drawn and seen <= micros + 86400000000
if is_chosen then drawn = seen + 1 end

-- The record of the new ticket. If the client has chosen the number, '=' says so: see record.lua.
-- (No client of a quorum asks for a ticket that lingers, and others do not read '='.) The number may
-- then be ahead of the clock, so the expiry cannot be counted from it.
local function new_record()
  local record = with_expiry(number .. ARGV[1], now + ttl)
  if not is_chosen or string.byte(record, MARK) == 126 then return record end -- '~'
  return string.sub(record, NUMBER, CAPACITY_END) .. '=' .. string.sub(record, CHANNEL)
end

-- The name has no tickets, as in the most frequent case, and the client has chosen the number.
-- Every enqueue for a free name at a node of a quorum comes here.
if is_chosen and drawn < tonumber(END_OF_NUMBERS) and (not was or #was == LAST_END and string.find(was, '^%d+$')) then
  number = string.format('%016d', drawn)
  if was and string.sub(was, THOUSAND_S, THOUSAND_S_END) == string.sub(number, THOUSAND_S, THOUSAND_S_END) then
    redis.call('SET', key, new_record(), 'KEEPTTL')
  else
    redis.call('SET', key, new_record(), 'PX', string.format('%d', DAY_MS + math.floor((drawn - micros) / 1000)))
  end
  return number
end

-- include line.lua

local line = read(key, was, now)
if line.err then return line end
permits, capacity = tonumber(permits), tonumber(capacity)

-- Handles a request whose id has a ticket, from an earlier try.
local function repeated(known, place)
  -- If the lease has expired, a repeated try must not take a new ticket.
  local lives = end_of(known) > now
  if lives then
    line.raise = true
    change(line, place, id, with_expiry(known, now + ttl))
  elseif place then
    remove(line, place, id)
  end
  bury(line)
  grant(line, id)
  if not lives then return 4 end
  return (not place or line.asker_holds) and 0 or 1, string.sub(known, NUMBER, NUMBER_END)
end

-- Whether the name has as many tickets as it may have. Before the answer is yes, this function
-- removes expired waiters from 128 places, beginning at a random one. Otherwise many expired
-- waiters could keep others out until `head` reaches them, because all other code looks only at the
-- first waiter.
local function is_full()
  if line.next - line.head + line.out < MOST_TICKETS or count(line) < MOST_TICKETS then return false end
  if line.head == line.next then return true end
  local from = line.head + micros % (line.next - line.head)
  local places = {}
  for place = from, math.min(from + 128, line.next) - 1 do
    places[#places + 1] = string.format('%013d', place)
  end
  local records = redis.call('HMGET', line.rows, unpack(places))
  for i, place in ipairs(places) do
    if records[i] and end_of(records[i]) <= now then
      redis.call('HDEL', line.rows, place, id_of(records[i]))
    end
  end
  compact(line)
  return count(line) >= MOST_TICKETS
end

-- Takes the ticket. Returns the kind of reply, and the ticket's number.
local function take()
  if is_marked(line, id) then return 4 end
  local known, place = find(line, id)
  if known then return repeated(known, place) end
  bury(line)
  grant(line)
  local alone = line.out == 0
  if line.stored then
    if capacity == FULL then return 3 end
  elseif not alone and line.capacity ~= capacity then
    return 3
  end
  local holds = not first(line) and line.out + permits <= (line.stored or capacity)
  -- first() has passed the empty places.
  if not holds and line.solo and line.head == line.next and string.byte(line.solo, MARK) == 126 then -- '~'
    tell(line.key, line.solo, 'wanted')
  end
  if not holds and (ARGV[3] == '0' or is_full()) then return 2 end
  if drawn >= tonumber(END_OF_NUMBERS) then return 5 end
  number = string.format('%016d', drawn)

  line.raise = line.raise or string.sub(line.last, THOUSAND_S, THOUSAND_S_END) ~= string.sub(number, THOUSAND_S, THOUSAND_S_END)
  if holds then
    if alone then line.capacity = capacity end
    hold(line, id, new_record(), permits)
  else
    append(line, id, new_record())
  end
  line.last = number
  return holds and 0 or 1, number
end

local status, ticket = settle(line, { [id] = true }, take)
if line.denied then return line.denied end
if status == 0 then return ticket end
if status == 1 then return {1, ticket, ttl, recheck(line, id)} end
if status == 2 then
  local ends = soonest(line)
  return {2, ends and ends - now or -1}
end
if status == 3 then return {3, line.stored or line.capacity} end
return {status}
