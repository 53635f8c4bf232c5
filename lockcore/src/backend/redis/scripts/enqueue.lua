-- Takes a ticket, or finds the one that an earlier try with the same id left and renews it.
--
-- KEYS  1 tickets, 2 queue, 3 mark of a release that came first
-- ARGV  1 prefix of wake-up channels
--       2 id                 3 permits            4 capacity        5 ttl in ms
--       6 '1' to wait, '0' to leave nothing behind if the permits are not free
--       7 highest ticket number that the client has seen
--       8 wake-up channel without its prefix      9 owner, for people
-- Reply {0, ticket, ttl in ms}                    granted
--       {1, ticket, ttl in ms, recheck in ms}     waiting; -1: no recheck
--       {2, ms until the first holder expires}    busy; -1: unknown
--       {3, capacity in use}                      another capacity is in use
--       {4}                                       this id was released before, or has expired
--       {5}                                       ticket numbers are exhausted
--
-- Atomic as every script. The first write is one that a full server refuses (HSET), so that an
-- enqueue under OOM is refused whole.

local tickets, queue, id, ttl = KEYS[1], KEYS[2], ARGV[2], tonumber(ARGV[5])
local MAX_TICKET = 9007199254740991
local DAY_MICROS, HOUR_MICROS, DAY_MS = 86400000000, 3600000000, 86400000

local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)

-- Numbers only rise: over the last one drawn, over the server's clock, and over what the client has
-- seen if the server lost its data; the last not beyond a day, or one wrong clock would poison all.
local function draw(last)
  local number = math.max(last + 1, micros)
  local seen = tonumber(ARGV[7])
  if seen >= number and seen <= micros + DAY_MICROS then number = seen + 1 end
  return number
end

-- Numbers go to Redis as numbers (17 digits), and the milliseconds of an expiry have 13 digits, which
-- Lua writes out in full up to 14.
local function write(number, last, queue_is_new)
  redis.call('HSET', tickets, 'last', number, id, now + ttl .. ':' .. ARGV[3] .. ':' .. ARGV[4] ..
    ':' .. ARGV[5] .. ':' .. ARGV[8] .. ':' .. string.format('%.0f', number) .. ':' .. ARGV[9])
  redis.call('ZADD', queue, number, id)
  -- As keep() in line.lua, but only with the first ticket of an hour: no ticket lives for longer than
  -- 12 of them. A queue that was empty is a new key.
  local new_hour = math.floor(last / HOUR_MICROS) ~= math.floor(number / HOUR_MICROS)
  if new_hour or queue_is_new then
    local until_ms = math.max(now, math.floor(number / 1000)) + DAY_MS
    redis.call('PEXPIREAT', queue, until_ms)
    if new_hour then redis.call('PEXPIREAT', tickets, until_ms) end
  end
end

-- The common case: nobody is here, and no release came first.
local here = redis.call('EXISTS', queue, KEYS[3])
if here == 0 then
  local last = tonumber(redis.call('HGET', tickets, 'last') or '0')
  local number = draw(last)
  if number > MAX_TICKET then return {5} end
  write(number, last, true)
  return {0, number, ttl}
end

-- include line.lua

-- There is a queue, a mark, or both.
if here == 2 or redis.call('EXISTS', queue) == 0 then return {4} end
local permits, capacity = tonumber(ARGV[3]), tonumber(ARGV[4])
local line = walk(tickets, queue, now, nil, id)
-- A repetition that comes after the lease is over: what settle() removes must not be taken anew.
if line.expired then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {4}
end

-- A repeated request.
local known = redis.call('HMGET', tickets, id, 'last')
local last = tonumber(known[2] or '0')
if known[1] then
  local number = redis.call('ZSCORE', queue, id)
  if number and parse(known[1]) > now then
    redis.call('HSET', tickets, id, with_expiry(known[1], now + ttl))
    keep(tickets, queue, now, last)
    settle(tickets, queue, now, line, ARGV[1], id)
    if line.asker then return {0, tonumber(number), ttl} end
    return {1, tonumber(number), ttl, recheck(line, id, now)}
  end
end

if line.capacity and line.capacity ~= capacity then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {3, line.capacity}
end
local granted = not line.blocked and line.used + permits <= capacity
if not granted and ARGV[6] == '0' then
  settle(tickets, queue, now, line, ARGV[1], nil)
  return {2, line.soonest and line.soonest - now or -1}
end

local number = draw(last)
if number > MAX_TICKET then return {5} end
write(number, last, false)
settle(tickets, queue, now, line, ARGV[1], nil)
if granted then return {0, number, ttl} end
return {1, number, ttl, recheck(line, nil, now)}
