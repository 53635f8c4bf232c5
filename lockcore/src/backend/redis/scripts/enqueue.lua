-- Takes a ticket, or finds the one that an earlier try with the same id left and renews it.
--
-- KEYS  1 tickets, 2 queue, 3 mark of a release that came first
-- ARGV  1 prefix of wake-up channels
--       2 id                 3 ttl in ms
--       4 the end of its record: 'permits:capacity:channel:owner'
--       5 '1' to wait, '0' to leave nothing behind if the permits are not free
--       6 highest ticket number that the client has seen
-- Reply {0, ticket, ttl in ms}                    granted
--       {1, ticket, ttl in ms, recheck in ms}     waiting; -1: no recheck
--       {2, ms until the first holder expires}    busy, or too many wait; -1: unknown
--       {3, capacity in use}                      another capacity is in use
--       {4}                                       this id was released before, or has expired
--       {5}                                       ticket numbers are exhausted
--
-- Atomic as every script. The first write is one that a full server refuses (HSET), so that an
-- enqueue under OOM is refused whole; one that had to make an evicted queue anew is carried out whole.
--
-- Numbers go to Redis as text made by '%d': what Redis makes of a Lua number is not exact, and '%.0f'
-- takes longer. A 32-bit server, where it ends at 31 bits, is refused when connecting (rights.lua).

local tickets, queue, id, ttl = KEYS[1], KEYS[2], ARGV[2], tonumber(ARGV[3])
local MAX_TICKET = 9007199254740991
local DAY_MICROS, HOUR_MICROS = 86400000000, 3600000000
local MOST_TICKETS = 10000

local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)

-- Numbers only rise: over the last one drawn, over the server's clock, and over what the client has
-- seen if the server lost its data; the last not beyond a day, or one wrong clock would poison all.
local function draw(last)
  local number = math.max(last + 1, micros)
  local seen = tonumber(ARGV[6])
  if seen >= number and seen <= micros + DAY_MICROS then number = seen + 1 end
  return number
end

-- Who is there: the first two tickets, and whether there is a queue. One ticket alone has none.
local front, in_queue = {}, false

local function write(number, last)
  local text = string.format('%d', number)
  redis.call('HSET', tickets, 'last', text, id, string.format('%d:%s:%s', now + ttl, text, ARGV[4]))
  if in_queue then
    redis.call('RPUSH', queue, id)
  elseif front[1] then
    redis.call('RPUSH', queue, front[1], id)
  end
  -- As keep() in line.lua, but only with the first ticket of an hour: no ticket lives for longer than
  -- 12 of them.
  local new_hour = math.floor(last / HOUR_MICROS) ~= math.floor(number / HOUR_MICROS)
  local new_queue = front[1] and not in_queue
  if new_hour or new_queue then
    local until_ms = string.format('%d', math.floor((math.max(micros, number) + DAY_MICROS) / 1000))
    if new_hour then redis.call('PEXPIREAT', tickets, until_ms) end
    if front[1] then redis.call('PEXPIREAT', queue, until_ms) end
  end
end

-- The common case: nobody is here, and no release came first.
local here = redis.call('EXISTS', queue, KEYS[3])
local fields
if here == 0 then
  fields = redis.call('HGETALL', tickets)
  if #fields <= 2 then
    local last = tonumber(fields[2] or '0')
    local number = draw(last)
    if number > MAX_TICKET then return {5} end
    write(number, last)
    return {0, number, ttl}
  end
end

-- The records of this ticket, of the first and of the second, and in between the last number.
local known
if here > 0 then
  front, in_queue = here == 1 and redis.call('LRANGE', queue, '0', '1') or {}, true
  -- It is the mark that is there.
  if #front == 0 then return {4} end
  known = redis.call('HMGET', tickets, id, 'last', front[1], front[2] or front[1])
elseif #fields == 4 then
  local of_last = fields[1] == 'last' and 1 or 3
  local of_first = 4 - of_last
  front[1] = fields[of_first]
  known = { front[1] == id and fields[of_first + 1], fields[of_last + 1], fields[of_first + 1] }
end

-- include record.lua

-- The next most common: an exclusive lock is held and this one has to wait, behind nobody who is dead.
local permits, capacity = string.match(ARGV[4], '^(%d+):(%d+):')
if known and not known[1] and known[3] and ARGV[5] == '1' then
  local expires, held, of = parse(known[3])
  local nobody_dead = not front[2] or known[4] and parse(known[4]) > now
  if expires > now and held == of and of == capacity and nobody_dead
    and (not front[2] or redis.call('LLEN', queue) < MOST_TICKETS) then
    local last = tonumber(known[2] or '0')
    local number = draw(last)
    if number > MAX_TICKET then return {5} end
    write(number, last)
    return {1, number, ttl, front[2] and -1 or expires - now}
  end
end

-- include line.lua

if not known then
  front = ordered(tickets, queue, now)
  in_queue = #front > 1
  known = redis.call('HMGET', tickets, id, 'last')
end
local last = tonumber(known[2] or '0')
permits, capacity = tonumber(permits), tonumber(capacity)
local page = known[3] ~= nil
local line = walk(tickets, queue, now, {
  asker = id, ids = page and front, records = page and { known[3], known[4] },
})
-- A repetition that comes after the lease is over must not be taken anew.
local expired = known[1] and parse(known[1]) <= now
if expired and not line.expired then line.dead[#line.dead + 1] = id end
if expired or line.expired then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {4}
end

-- A repeated request.
if known[1] then
  local number = tonumber(string.match(known[1], '^%d+:(%d+):'))
  redis.call('HSET', tickets, id, with_expiry(known[1], now + ttl))
  keep(tickets, queue, now, last)
  settle(tickets, queue, now, line, ARGV[1], id)
  if line.asker then return {0, number, ttl} end
  return {1, number, ttl, recheck(line, id, now)}
end

if line.capacity and line.capacity ~= capacity then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {3, line.capacity}
end
-- Whether as many wait as may. Nobody behind the first who waits has been looked at, so that some are
-- now, anywhere in the line: a crowd that has died must not keep everybody out until its turn comes.
local function is_full()
  local length = redis.call('LLEN', queue)
  if length - #line.dead < MOST_TICKETS then return false end
  local from = micros % length
  local ids = redis.call('LRANGE', queue, from, from + 127)
  local records = redis.call('HMGET', tickets, unpack(ids))
  local known = {}
  for _, id in ipairs(line.dead) do known[id] = true end
  for i, id in ipairs(ids) do
    if not known[id] and not (records[i] and parse(records[i]) > now) then
      line.dead[#line.dead + 1] = id
    end
  end
  return length - #line.dead >= MOST_TICKETS
end

local granted = not line.blocked and line.used + permits <= capacity
if not granted and (ARGV[5] == '0' or is_full()) then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {2, line.soonest and line.soonest - now or -1}
end

local number = draw(last)
if number > MAX_TICKET then return {5} end
write(number, last)
settle(tickets, queue, now, line, ARGV[1], id)
if granted then return {0, number, ttl} end
return {1, number, ttl, recheck(line, nil, now)}
