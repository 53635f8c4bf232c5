-- What the verbs share: walking the line of one name. It needs record.lua.
--
-- A name has two keys:
--   tickets  hash    id -> record (see record.lua), and 'last' -> the number drawn last
--   queue    list    ids by number: numbers only rise, and a ticket is put at the end
-- The hash is the truth. The queue is its order, made when a second ticket comes; if it is evicted it is
-- made anew. An id in it without a record is of a ticket that has gone.

local DAY_MS = 86400000
local MANY = 128

-- Lets both keys live until a day after the clock has passed the last number. A ticket lives for 12
-- hours at most, so that no request with a short ttl can end a key under a ticket with a long one. Only a
-- clock that is put back by 12 hours or more, and then forward again, can.
local function keep(tickets, queue, now, last)
  local until_ms = string.format('%d', math.max(now, math.floor(last / 1000)) + DAY_MS)
  redis.call('PEXPIREAT', tickets, until_ms)
  if queue then redis.call('PEXPIREAT', queue, until_ms) end
end

-- The ids of all tickets by number, for a name that has no queue. Several ought to have one, and get it.
local function ordered(tickets, queue, now)
  local fields = redis.call('HGETALL', tickets)
  local ids, numbers, last = {}, {}, 0
  for i = 1, #fields, 2 do
    local id, value = fields[i], fields[i + 1]
    if id == 'last' then
      last = tonumber(value)
    else
      ids[#ids + 1] = id
      numbers[id] = tonumber(string.match(value, '^%d+:(%d+):'))
    end
  end
  if #ids > 1 then
    table.sort(ids, function(a, b) return numbers[a] < numbers[b] end)
    redis.call('DEL', queue) -- after which the rest passes on a full server
    for _, id in ipairs(ids) do redis.call('RPUSH', queue, id) end
    keep(tickets, queue, now, last)
  end
  return ids
end

-- Walks a name's tickets from the oldest on, for as long as they hold or newly hold. Nothing is changed
-- here: settle() does that.
--
-- `whose` has
--   leaving   id of a ticket that is about to go
--   asker     id of one that wants to know about itself
--   keeps     of how many permits the asker is to keep at most
--   ids, records   the first two, or the only one, if they have been read; else it reads them
--
-- Returns a table:
--   used      permits of those that stay and hold
--   blocked   id of the first that stays and does not hold, and blocked_at, its place in the queue; nil if
--             all that stay hold
--   capacity  of the oldest that stays; nil if none does
--   soonest   when the first of the holders expires; nil if nobody holds
--   asker     whether the asker holds
--   was_first   whether the one that is about to go was the first in line, so that the blocked one is now
--   expired   whether the asker is among the dead
--   dead      ids that have expired, or have no record
--   granted   {id, record} of those that hold now and did not before
local function walk(tickets, queue, now, whose)
  local leaving, asker, keeps = whose.leaving, whose.asker, whose.keeps
  local line = { used = 0, dead = {}, granted = {}, asker = false }
  local before, at, page, holder_left = 0, 0, 2, false
  local ids, records = whose.ids, whose.records
  while true do
    if not ids then
      ids = redis.call('LRANGE', queue, at, at + page - 1)
      if #ids == 0 and at == 0 then
        ids = ordered(tickets, queue, now)
        -- Of thousands, unpack() takes a page at a time.
        if #ids > page then ids = redis.call('LRANGE', queue, '0', page - 1) end
      end
      if #ids == 0 then return line end
      records = redis.call('HMGET', tickets, unpack(ids))
    end
    for i, id in ipairs(ids) do
      local record = records[i]
      if not record then
        line.dead[#line.dead + 1] = id
        line.expired = line.expired or id == asker
      else
        local expires, permits, capacity = parse(record)
        permits, capacity = tonumber(permits), tonumber(capacity)
        local was_older = before
        before = before + permits
        if keeps and id == asker then permits = math.min(permits, keeps) end
        if expires <= now then
          line.dead[#line.dead + 1] = id
          line.expired = line.expired or id == asker
        elseif id ~= leaving then
          line.capacity = line.capacity or capacity
          if line.used + permits > line.capacity then
            line.blocked, line.blocked_at = id, at + i - 1
            return line
          end
          line.used = line.used + permits
          if not line.soonest or expires < line.soonest then line.soonest = expires end
          if was_older + permits > line.capacity then
            line.granted[#line.granted + 1] = { id, record }
          end
          if id == asker then line.asker = true end
          -- Nobody behind can hold; only an asker, or a waiter that goes, has to know the first in line.
          if holder_left and line.used == line.capacity then return line end
        else
          -- All before it hold.
          holder_left = line.used + permits <= (line.capacity or capacity)
          line.was_first = not holder_left
        end
      end
    end
    if #ids < page then return line end
    at, page = at + page, math.min(page * 4, 128)
    ids = nil
  end
end

-- A holder's time ends, and nobody will tell those who wait behind it; the first in line knows when, but not
-- if it is the first only now, or the grant one that nobody heard. So the first of them that lives and hears
-- it, of the next few, is told now to look again then. The asker is not, its reply says it: then this returns
-- in how many ms.
local function look_again(tickets, queue, now, prefix, ends, asker)
  local line = walk(tickets, queue, now, {})
  if not line.blocked then return end
  local ids = redis.call('LRANGE', queue, line.blocked_at, line.blocked_at + 15)
  local records = redis.call('HMGET', tickets, unpack(ids))
  local in_ms = ends - now + 10
  local message = string.format(' again %d', in_ms)
  for i, id in ipairs(ids) do
    if id == asker then return in_ms end
    local expires, channel = string.match(records[i] or '', '^(%d+):%d+:%d+:%d+:(%x+):')
    local lives = channel and tonumber(expires) > now
    if lives and tell(prefix .. channel, id .. message) > 0 then return end
  end
end

-- Removes the dead and wakes whoever holds because of it. Call it before soonest is told to anybody.
local function settle(tickets, queue, now, line, prefix, asker)
  for _, id in ipairs(line.dead) do redis.call('HDEL', tickets, id) end
  if #line.dead > MANY then
    -- To look for each would take as long as the line is long.
    redis.call('DEL', queue)
    ordered(tickets, queue, now)
  else
    for _, id in ipairs(line.dead) do redis.call('LREM', queue, '1', id) end
  end
  local unheard
  for _, grant in ipairs(line.granted) do
    local ends = grant[1] ~= asker and wake(tickets, grant[1], grant[2], now, prefix)
    if ends then
      line.soonest = math.min(line.soonest, ends)
      unheard = math.max(unheard or 0, ends)
    end
  end
  local ends = line.was_first and line.blocked and line.soonest or unheard
  if ends then line.again = look_again(tickets, queue, now, prefix, ends, asker) end
end

-- How long until a ticket may have moved up without a wake-up: -1 but for the first in line, and for one
-- that is to look again.
local function recheck(line, id, now)
  if (line.blocked == nil or line.blocked == id) and line.soonest then
    return line.soonest - now
  end
  return line.again or -1
end

-- The answer of a batch on a replica, in place of one for each ticket. Every write is refused there, also the
-- first for each ticket, so that nothing has been written and nobody been told.
local REPLICA = 'READONLY this server is a replica'

-- Whether that is why one of a batch failed.
local function is_replica(reason)
  return string.find(tostring(reason), 'READONLY', 1, true)
end
