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

local tickets, queue, mark, id = KEYS[1], KEYS[2], KEYS[3], ARGV[2]
local permits, capacity, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local MAX_TICKET = 9007199254740991

local now, micros = clock()
local line
local known = { false, false }
-- One look tells the common case: nobody is here, and no release came first.
if redis.call('EXISTS', queue, mark) == 0 then
  known[2] = redis.call('HGET', tickets, 'last')
else
  if redis.call('EXISTS', mark) == 1 then return {4} end
  line = walk(tickets, queue, now, nil, id)
  known = redis.call('HMGET', tickets, id, 'last')
  -- A repetition that comes after the lease is over: what settle() removes must not be taken anew.
  if line.expired then
    settle(tickets, queue, now, line, ARGV[1], nil)
    return {4}
  end
end

-- A repeated request.
if line and known[1] then
  local number = redis.call('ZSCORE', queue, id)
  if number and parse(known[1]) > now then
    redis.call('HSET', tickets, id, with_expiry(known[1], now + ttl))
    keep(tickets, queue, now, tonumber(known[2] or '0'))
    settle(tickets, queue, now, line, ARGV[1], id)
    if line.asker then return {0, tonumber(number), ttl} end
    return {1, tonumber(number), ttl, recheck(line, id, now)}
  end
end

local granted = true
if line then
  if line.capacity and line.capacity ~= capacity then
    settle(tickets, queue, now, line, ARGV[1], nil)
    return {3, line.capacity}
  end
  granted = not line.blocked and line.used + permits <= capacity
  if not granted and ARGV[6] == '0' then
    settle(tickets, queue, now, line, ARGV[1], nil)
    return {2, line.soonest and line.soonest - now or -1}
  end
end

-- Numbers only rise: over the last one drawn, over the server's clock, and over what the client has
-- seen if the server lost its data; the last not beyond a day, or one wrong clock would poison all.
local number = math.max(tonumber(known[2] or '0') + 1, micros)
local seen = tonumber(ARGV[7])
if seen >= number and seen <= micros + DAY_MS * 1000 then number = seen + 1 end
if number > MAX_TICKET then return {5} end
local text = string.format('%.0f', number)

redis.call('HSET', tickets, 'last', text, id, string.format('%.0f', now + ttl) .. ':' ..
  ARGV[3] .. ':' .. ARGV[4] .. ':' .. ARGV[5] .. ':' .. ARGV[8] .. ':' .. ARGV[9])
redis.call('ZADD', queue, text, id)
keep(tickets, queue, now, number)
if line then settle(tickets, queue, now, line, ARGV[1], nil) end
if granted then return {0, number, ttl} end
return {1, number, ttl, recheck(line, nil, now)}
