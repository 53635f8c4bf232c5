-- What the verbs share: reading the clock and walking the line of one name.
--
-- A name has two keys:
--   tickets  hash    id -> 'expires_ms:permits:capacity:ttl_ms:channel:number:owner', and 'last' ->
--                    the number drawn last
--   queue    zset    id, scored by the ticket's number: the order
-- A ticket counts only if it is in both.

local DAY_MS = 86400000
-- A waiter that no connection listens for is given this long to come back and renew.
local UNHEARD_MS = 2000

-- Server time in milliseconds and in microseconds.
local function clock()
  local time = redis.call('TIME')
  local micros = time[1] * 1000000 + time[2]
  return math.floor(micros / 1000), micros
end

-- Lets both keys live until a day after the clock has passed the last number. A ticket lives for 12
-- hours at most, so that no request with a short ttl can end a key under a ticket with a long one.
local function keep(tickets, queue, now, last)
  local until_ms = math.max(now, math.floor(last / 1000)) + DAY_MS
  redis.call('PEXPIREAT', tickets, until_ms)
  redis.call('PEXPIREAT', queue, until_ms)
end

local function parse(record)
  local expires, permits, capacity = string.match(record, '^(%d+):(%d+):(%d+):')
  return tonumber(expires), tonumber(permits), tonumber(capacity)
end

-- The record with another expiry, whose 13 digits Lua writes out in full; the rest never changes.
local function with_expiry(record, expires)
  return expires .. string.sub(record, string.find(record, ':', 1, true), -1)
end

-- Walks a name's tickets from the oldest on, for as long as they hold or newly hold.
--
-- `leaving` is the id of a ticket that is about to go, `asker` one that wants to know about itself.
-- Nothing is written here: settle() does that.
--
-- Returns a table:
--   used      permits of those that stay and hold
--   blocked   id of the first that stays and does not hold; nil if all that stay hold
--   capacity  of the oldest that stays; nil if none does
--   soonest   when the first of the holders expires; nil if nobody holds
--   asker     whether the asker holds
--   expired   whether the asker is among the dead
--   dead      ids that have expired, or are in one key only
--   granted   {id, record} of those that hold now and did not before
local function walk(tickets, queue, now, leaving, asker)
  local line = { used = 0, dead = {}, granted = {}, asker = false }
  local before, at, page = 0, 0, 2
  while true do
    local ids = redis.call('ZRANGE', queue, at, at + page - 1)
    if #ids == 0 then return line end
    local records = redis.call('HMGET', tickets, unpack(ids))
    for i, id in ipairs(ids) do
      local record = records[i]
      if not record then
        line.dead[#line.dead + 1] = id
        line.expired = line.expired or id == asker
      else
        local expires, permits, capacity = parse(record)
        local was_older = before
        before = before + permits
        if expires <= now then
          line.dead[#line.dead + 1] = id
          line.expired = line.expired or id == asker
        elseif id ~= leaving then
          line.capacity = line.capacity or capacity
          if line.used + permits > line.capacity then
            line.blocked = id
            return line
          end
          line.used = line.used + permits
          if not line.soonest or expires < line.soonest then line.soonest = expires end
          if was_older + permits > line.capacity then
            line.granted[#line.granted + 1] = { id, record }
          end
          if id == asker then line.asker = true end
          -- Nobody behind can hold; only an asker has to know who is first in line.
          if leaving and line.used == line.capacity then return line end
        end
      end
    end
    if #ids < page then return line end
    at, page = at + page, math.min(page * 4, 128)
  end
end

-- Removes the dead and wakes whoever holds because of it. One message per grant, to the channel of
-- its client; a grant that nobody hears is cut short, so that a dead waiter costs two seconds and
-- not its whole ttl. Call it before soonest is told to anybody.
local function settle(tickets, queue, now, line, prefix, asker)
  -- In slices: Lua 5.1 cannot pass more than some 8,000 arguments.
  for from = 1, #line.dead, 1000 do
    local to = math.min(from + 999, #line.dead)
    redis.call('ZREM', queue, unpack(line.dead, from, to))
    redis.call('HDEL', tickets, unpack(line.dead, from, to))
  end
  for _, grant in ipairs(line.granted) do
    local id, record = grant[1], grant[2]
    if id ~= asker then
      local expires, channel, number = string.match(record, '^(%d+):%d+:%d+:%d+:(%x+):(%d+):')
      local heard = redis.call('PUBLISH', prefix .. channel, id .. ' ' .. number)
      if heard == 0 and tonumber(expires) > now + UNHEARD_MS then
        redis.call('HSET', tickets, id, with_expiry(record, now + UNHEARD_MS))
        -- Who waits behind it looks again then.
        line.soonest = math.min(line.soonest, now + UNHEARD_MS)
      end
    end
  end
end

-- How long until a ticket may have moved up without a wake-up: -1 but for the first in line.
local function recheck(line, id, now)
  if (line.blocked == nil or line.blocked == id) and line.soonest then
    return line.soonest - now
  end
  return -1
end
