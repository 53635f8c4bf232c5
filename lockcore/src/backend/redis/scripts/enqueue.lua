-- Takes a ticket, or finds the one that an earlier try with the same id left and renews it.
--
-- KEYS  1 the name's key; the others of a name are made from it, see line.lua
-- ARGV  1 the end of its record, from the id on: see record.lua
--       2 ttl in ms
--       3 highest ticket number that the client has seen
--       4 '0' to leave nothing behind if the permits are not free; not there to wait
-- Reply number of the ticket                      granted, for the ttl
--       {1, ticket, ttl in ms, recheck in ms}     waiting; -1: no recheck
--       {2, ms until the first holder expires}    busy, or too many wait; -1: unknown
--       {3, capacity in use}                      another capacity is in use
--       {4}                                       this id was released before, or has expired
--       {5}                                       ticket numbers are exhausted
--
-- Atomic as every script. On a full server its first write is refused, and so all of it.
--
-- If the user is denied a command in the middle: with nobody here, there is but one write. In the short way to
-- wait, the state is written before the row. Without the row its place is empty, and the line passes it; without
-- the life of the rows all else is there. The rest is argued at put_down() in line.lua.
--
-- Numbers go to Redis as text made by '%d': what Redis makes of a Lua number is not exact, and '%.0f'
-- takes longer. A 32-bit server, where it ends at 31 bits, is refused when connecting (rights.lua).

local key, ttl = KEYS[1], ARGV[2] + 0
local was = redis.call('GET', key)
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local last = was and tonumber(string.sub(was, 1, 16)) or 0

-- Numbers only rise: over the last one drawn, over the server's clock, and over what the client has
-- seen. The last drawn begins the value in each of its forms, and whatever is written in its place
-- begins with it again: no grant, release, expiry or clock that steps back makes the next number
-- smaller. If the value is lost, or is an older one because the server lost what came after, the clock is
-- beyond every number that was drawn from it before; if the clock was put back as well, only the client
-- can know better. It is believed up to a day beyond the clock, or one wrong clock would poison all.
local number = last + 1
if number < micros then number = micros end
local seen = ARGV[3] + 0
if seen >= number and seen <= micros + 86400000000 then number = seen + 1 end
local MAX_TICKET = 9007199254740991

-- How long keys live: until a day after the clock has passed the last number, which is later than now if the
-- clock was put back. Made longer with the first number of an hour only: no ticket lives for longer than 12
-- of them.
local new_hour = number % 3600000000 < number - last
local life
if new_hour then
  life = number == micros and '86400000' or string.format('%d', 86400000 + (number - micros) / 1000)
end

-- The common case: the name has no tickets. A value that this library has not written is refused by read() below.
if not was or #was == 16 and last > 0 and last % 1 == 0 then
  if number > MAX_TICKET then return {5} end
  local record = string.format('%016d%013d', number, micros / 1000 + ttl) .. ARGV[1]
  if new_hour then
    redis.call('SET', key, record, 'PX', life)
  else
    redis.call('SET', key, record, 'KEEPTTL')
  end
  return number
end

local now = math.floor(micros / 1000)
local id = string.sub(ARGV[1], 1, 32)
local permits, capacity = string.sub(ARGV[1], 34, 43), string.sub(ARGV[1], 45, 54)
local MOST_TICKETS = 10000

-- The next most common: somebody holds all permits and this one has to wait, behind nobody who is dead.
local in_line = string.byte(was, 17) == 76 -- 'L'
local at = in_line and 76 or 0
local expires = tonumber(string.sub(was, at + 17, at + 29))
if expires and expires > now and not ARGV[4] and number <= MAX_TICKET then
  local held, of = string.sub(was, at + 63, at + 72), string.sub(was, at + 74, at + 83)
  if held == of and of == capacity and string.sub(was, at + 30, at + 61) ~= id then
    local rows = key .. ':line'
    local record = string.format('%016d%013d%s', number, now + ttl, ARGV[1])
    if not in_line then
      if redis.call('EXISTS', rows, key .. ':ends') == 0 then
        local life = string.format('%d', 86400000 + (number - micros) / 1000)
        local head = string.format('%016dL000000000000000000000000010000000000002', number)
        redis.call('SET', key, head .. held .. of .. was, 'PX', life)
        redis.call('HSET', rows, '0000000000001', record, id, '0000000000001')
        redis.call('PEXPIRE', rows, life)
        return {1, number, ttl, expires - now}
      end
    elseif string.sub(was, 18, 30) == '0000000000000' then
      local first, next = string.sub(was, 31, 43), string.sub(was, 44, 56)
      local known = redis.call('HMGET', rows, id, first)
      local ahead = first ~= next
      local nobody_dead = not ahead or known[2] and tonumber(string.sub(known[2], 17, 29)) > now
      if not known[1] and nobody_dead and next - first + 1 < MOST_TICKETS then
        local head = string.format('%016d', number) .. string.sub(was, 17, 43)
        local value = head .. string.format('%013d', next + 1) .. string.sub(was, 57)
        if new_hour or not ahead then
          local life = string.format('%d', 86400000 + (number - micros) / 1000)
          redis.call('SET', key, value, 'PX', life)
          redis.call('HSET', rows, next, record, id, next)
          redis.call('PEXPIRE', rows, life)
        else
          redis.call('SET', key, value, 'KEEPTTL')
          redis.call('HSET', rows, next, record, id, next)
        end
        return {1, number, ttl, ahead and -1 or expires - now}
      end
    end
  end
end

-- include record.lua
-- include line.lua

local line = read(key, was, now)
if line.err then return line end
permits, capacity = tonumber(permits), tonumber(capacity)

-- An earlier try left it.
local function repeated(known, place)
  -- A repetition that comes after the lease is over must not be taken anew.
  local lives = parse(known) > now
  if lives then
    line.raise = true
    change(line, place, id, with_expiry(known, now + ttl))
  elseif place then
    remove(line, place, id)
  end
  bury(line)
  grant(line, id)
  if not lives then return 4 end
  return (not place or line.asker_holds) and 0 or 1, tonumber(string.sub(known, 1, 16))
end

-- Whether as many wait as may. Nobody behind the first who waits has been looked at, so that some are
-- now, anywhere in the line: a crowd that has died must not keep everybody out until its turn comes.
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
    if records[i] and parse(records[i]) <= now then
      redis.call('HDEL', line.rows, place, id_of(records[i]))
    end
  end
  compact(line)
  return count(line) >= MOST_TICKETS
end

-- Which reply it is to be, and the ticket's number.
local function take()
  if line.marks > now and redis.call('EXISTS', key .. ':gone:' .. id) == 1 then return 4 end
  local known, place = find(line, id)
  if known then return repeated(known, place) end
  bury(line)
  grant(line)
  local alone = line.out == 0
  if not alone and line.capacity ~= capacity then return 3 end
  local holds = not first(line) and (alone or line.out + permits <= capacity)
  if not holds and (ARGV[4] or is_full()) then return 2 end
  if number > MAX_TICKET then return 5 end

  line.raise = line.raise or new_hour
  local record = string.format('%016d%013d%s', number, now + ttl, ARGV[1])
  if holds then
    if alone then line.capacity = capacity end
    hold(line, id, record, permits)
  else
    append(line, id, record)
  end
  line.last = string.sub(record, 1, 16)
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
if status == 3 then return {3, line.capacity} end
return {status}
