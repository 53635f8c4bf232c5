-- Takes a ticket, or finds the one that an earlier try with the same id left and renews it.
--
-- KEYS  1 the name's key; the others of a name are made from it, see line.lua
-- ARGV  1 its record without the number, with '+' and its ttl in ms for the expiry: see record.lua
--       2 highest ticket number that the client has seen, in 16 digits
--       3 '0' to leave nothing behind if the permits are not free; not there to wait
-- Reply number of the ticket, as text            granted, for the ttl
--       {1, ticket, ttl in ms, recheck in ms}     waiting; -1: no recheck
--       {2, ms until the first holder expires}    busy, or too many wait; -1: unknown
--       {3, capacity in use}                      another capacity is in use
--       {4}                                       this id was released before, or has expired
--       {5}                                       ticket numbers are exhausted
--
-- Atomic as every script. On a full server its first write is refused, and so all of it.
--
-- If the user is denied a command in the middle: with nobody here, there is but one write. In the short way to
-- wait, the state is written first. Without the row its place is empty, and the line passes it. PEXPIRE is called
-- before the row is written too, as a row that is given no life would stay for ever. The rest is argued at
-- put_down() in line.lua.
--
-- Text is compared and joined as it is where that can be: to make a number of it and text of that again takes longer.
-- Numbers go to Redis as text made by '%d': what Redis makes of a Lua number is not exact, and '%.0f' takes longer.
-- A 32-bit server, where it ends at 31 bits, is refused when connecting (rights.lua).

local key = KEYS[1]
local was = redis.call('GET', key)
local time = redis.call('TIME')

-- Numbers only rise: over the last one drawn, over the server's clock, and over what the client has
-- seen. The last drawn begins the value in each of its forms, and whatever is written in its place
-- begins with it again: no grant, release, expiry or clock that steps back makes the next number
-- smaller. If the value is lost, or is an older one because the server lost what came after, the clock is
-- beyond every number that was drawn from it before; if the clock was put back as well, only the client
-- can know better.
--
-- So the next is the clock in microseconds, nearly always. All of these have 16 digits, and a value that is longer
-- than the number it begins with is greater than it.
local number = time[1] .. time[2]
if #time[2] < 6 then number = time[1] .. string.format('%06d', time[2]) end
local END_OF_NUMBERS = '9007199254740992'
local is_next = #number == 16 and number > ARGV[2] and number < END_OF_NUMBERS and (not was or number > was)

-- How long keys live: until a day after the clock has passed the last number, which is later than now if the
-- clock was put back. Made longer with the first number of a thousand seconds only, as these have their first 7
-- digits in common: no ticket lives for longer than 12 hours.
local DAY_MS = '86400000'

-- The common case: the name has no tickets. A value that this library has not written is refused by read() below.
if is_next and (not was or #was == 16 and string.find(was, '^%d+$')) then
  if was and string.sub(was, 1, 7) == string.sub(number, 1, 7) then
    redis.call('SET', key, number .. ARGV[1], 'KEEPTTL')
  else
    redis.call('SET', key, number .. ARGV[1], 'PX', DAY_MS)
  end
  return number
end

-- include record.lua

local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local ttl, id = tonumber(string.sub(ARGV[1], 1, 13)), string.sub(ARGV[1], 14, 45)
local capacity = string.sub(ARGV[1], 58, 67)
local MOST_TICKETS = 10000

-- The next most common: somebody holds all permits and this one has to wait, behind nobody who is dead.
local in_line = was and string.byte(was, 17) == 76 -- 'L'
local at = in_line and 76 or 0
local ends = is_next and not ARGV[3] and string.sub(was, at + 63, at + 72) == capacity
  and string.sub(was, at + 74, at + 83) == capacity and string.sub(was, at + 30, at + 61) ~= id and end_of(was, at)
if ends and ends > now then
  local rows, record, recheck_in = key .. ':line', number .. ARGV[1], ends - now
  if not in_line then
    if redis.call('EXISTS', rows, key .. ':ends') == 0 then
      local head = number .. 'L000000000000000000000000010000000000002' .. capacity .. capacity
      redis.call('SET', key, head .. was, 'PX', DAY_MS)
      redis.call('PEXPIRE', rows, DAY_MS)
      redis.call('HSET', rows, '0000000000001', record, id, '0000000000001')
      redis.call('PEXPIRE', rows, DAY_MS)
      return {1, number, ttl, recheck_in}
    end
  elseif string.sub(was, 18, 30) == '0000000000000' then
    local first, next = string.sub(was, 31, 43), string.sub(was, 44, 56)
    local known = redis.call('HMGET', rows, id, first)
    local ahead = first ~= next
    if not known[1] and (not ahead or known[2] and end_of(known[2]) > now) and next - first + 1 < MOST_TICKETS then
      local value = number .. string.sub(was, 17, 43) .. string.format('%013d', next + 1) .. string.sub(was, 57)
      if ahead and string.sub(was, 1, 7) == string.sub(number, 1, 7) then
        redis.call('SET', key, value, 'KEEPTTL')
        redis.call('HSET', rows, next, record, id, next)
      else
        redis.call('SET', key, value, 'PX', DAY_MS)
        redis.call('PEXPIRE', rows, DAY_MS)
        redis.call('HSET', rows, next, record, id, next)
        redis.call('PEXPIRE', rows, DAY_MS)
      end
      return {1, number, ttl, ahead and -1 or recheck_in}
    end
  end
end

-- include line.lua

-- What the client has seen is believed up to a day beyond the clock, or one wrong clock would poison all.
local last, seen = was and tonumber(string.sub(was, 1, 16)) or 0, tonumber(ARGV[2])
local drawn = math.max(last + 1, micros)
if seen >= drawn and seen <= micros + 86400000000 then drawn = seen + 1 end

local line = read(key, was, now)
if line.err then return line end
local permits = tonumber(string.sub(ARGV[1], 47, 56))
capacity = tonumber(capacity)

-- An earlier try left it.
local function repeated(known, place)
  -- A repetition that comes after the lease is over must not be taken anew.
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
  return (not place or line.asker_holds) and 0 or 1, string.sub(known, 1, 16)
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
    if records[i] and end_of(records[i]) <= now then
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
  if not holds and (ARGV[3] or is_full()) then return 2 end
  if drawn >= tonumber(END_OF_NUMBERS) then return 5 end
  number = string.format('%016d', drawn)

  line.raise = line.raise or string.sub(line.last, 1, 7) ~= string.sub(number, 1, 7)
  local record = with_expiry(number .. ARGV[1], now + ttl)
  if holds then
    if alone then line.capacity = capacity end
    hold(line, id, record, permits)
  else
    append(line, id, record)
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
if status == 3 then return {3, line.capacity} end
return {status}
