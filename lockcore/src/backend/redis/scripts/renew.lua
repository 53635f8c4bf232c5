-- Prolongs tickets to a ttl from now. The request says how many permits a ticket should have. If
-- the ticket has more, it gives up the rest, and the waiters that can hold because of that get a
-- wake-up. A renewal never creates a ticket: if a ticket has expired or was evicted, it is lost.
--
-- KEYS  per ticket: the name's key; the name's other keys are made from it, see line.lua
-- ARGV  per ticket: id, permits in 10 digits, ttl in ms
-- Reply per ticket three numbers in a row:
--       0, ttl in ms, number          holds; the ticket's number if the client has chosen it, else -1
--       1, ttl in ms, recheck in ms   waits; -1: no recheck
--       2, -1, -1                     lost
--       3, -1, -1                     the renewal of this ticket has failed, and may be half done
--       4, ttl in ms, grace in ms     holds, and is asked back, see ask.lua
--       On a replica the reply is the error READONLY, and nothing is done.
--
-- If the user is denied a command in the middle: for a holder without waiters there is only one
-- write. The other cases are explained at put_down() in line.lua. A renewal that failed may have
-- been carried out.
--
-- In all other cases the work on a name begins with an HDEL that changes nothing. A full server
-- accepts the HDEL, and then the rest of the script. A replica refuses the HDEL. That matters
-- because a replica may not have received a ticket yet, and must not answer "lost".

-- include fields.lua

local reply, others = {}, {}
local now = clock()

local function answer(i, status, ttl, number)
  reply[3 * i - 2], reply[3 * i - 1], reply[3 * i] = status, ttl, number
end

-- The answer for a ticket that holds.
local function answer_holds(i, ttl, record)
  local grace = tonumber(string.match(record, '\n(%d+) ', CHANNEL))
  if grace then return answer(i, 4, ttl, grace) end
  answer(i, 0, ttl, string.byte(record, MARK) == 61 and tonumber(string.sub(record, NUMBER, NUMBER_END)) or -1) -- '='
end

-- The most frequent case: a holder without waiters.
local function renew_alone(i, was)
  if type(was) ~= 'string' or string.sub(was, ID, ID_END) ~= ARGV[3 * i - 2] then return false end
  if (end_of(was) or 0) <= now or string.sub(was, PERMITS, PERMITS_END) ~= ARGV[3 * i - 1] then return false end
  local life, last = '86400000', string.sub(was, LAST, LAST_END)
  if last / 1000 > now then life = string.format('%d', life + last / 1000 - now) end
  -- A full server refuses this SET. Then the code below renews the ticket.
  return not redis.pcall('SET', KEYS[i], with_expiry(was, now + ARGV[3 * i]), 'PX', life).err
end

local times_named, values = {}, {}
for _, key in ipairs(KEYS) do times_named[key] = (times_named[key] or 0) + 1 end
for i, key in ipairs(KEYS) do
  -- If a batch has several tickets of one name, they do not take this fast path: they are renewed
  -- in order.
  local was = times_named[key] == 1 and redis.pcall('GET', key)
  if renew_alone(i, was) then
    answer_holds(i, tonumber(ARGV[3 * i]), was)
  else
    if type(was) == 'string' then values[key] = was end
    others[#others + 1] = i
  end
end
if #others == 0 then return reply end

-- include line.lua

-- Renews one ticket of any kind. For a waiter, the answer is complete only after all messages were
-- sent: then its recheck is added.
local function renew(line, i, id, most, ttl, waiting)
  local record, place = find(line, id)
  if not record then return answer(i, 2, -1, -1) end
  line.raise = true
  local permits = size(record)
  if end_of(record) <= now then
    if place then remove(line, place, id) end
    return answer(i, 2, -1, -1)
  end
  record = place and with_expiry(record, now + ttl) or prolong(line, record, ttl)
  if permits > most then
    record = string.sub(record, NUMBER, BEFORE_PERMITS) .. string.format('%010d', most) .. string.sub(record, BEHIND_PERMITS)
  end
  change(line, place, id, record)
  if not place and permits > most then line.out = line.out - permits + most end
  line.asker_holds = not place
  bury(line)
  grant(line, id)
  if line.asker_holds then
    line.renewed[id] = true
    return answer_holds(i, ttl, record)
  end
  answer(i, 1, ttl, -1)
  waiting[id] = waiting[id] or {}
  table.insert(waiting[id], i)
end

-- Renews tickets in order. If the name has several holders, holders that are next to each other in
-- the batch and keep all their permits are written together.
local function renew_page(line, page, waiting)
  local ids, records = {}, {}
  for n, i in ipairs(page) do ids[n] = ARGV[3 * i - 2] end
  if not line.solo and line.out > 0 then records = redis.call('HMGET', line.rows, unpack(ids)) end
  local rows, ends, apart = {}, {}, {}
  local function write_rows()
    if #rows == 0 then return end
    line.raise = true
    redis.call('HSET', line.rows, unpack(rows))
    note(line, redis.pcall('ZADD', line.ends, 'XX', unpack(ends)))
    rows, ends = {}, {}
  end
  for n, i in ipairs(page) do
    local id, record = ids[n], records[n]
    local most, ttl = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
    -- If a ticket is in the batch twice, it may have fewer permits than when its record was read.
    local holds = record and #record > 13 and not apart[id]
    if holds and end_of(record) > now and size(record) <= most then
      record = prolong(line, record, ttl)
      rows[#rows + 1], rows[#rows + 2] = id, record
      ends[#ends + 1], ends[#ends + 2] = score(record), id
      line.renewed[id] = true
      answer_holds(i, ttl, record)
    else
      write_rows()
      renew(line, i, id, most, ttl, waiting)
      apart[id] = true
    end
  end
  write_rows()
end

local function renew_name(key, tickets)
  redis.call('HDEL', key .. ':line', '')
  local line, waiting = read(key, values[key] or redis.call('GET', key), now), {}
  if line.err then return false end
  settle(line, waiting, function()
    for from = 1, #tickets, 128 do
      renew_page(line, { unpack(tickets, from, math.min(from + 127, #tickets)) }, waiting)
    end
    if not line.raise then return end
    bury(line)
    grant(line)
  end)
  if line.denied then return false end
  for id, places in pairs(waiting) do
    for _, i in ipairs(places) do reply[3 * i] = recheck(line, id) end
  end
  return true
end

local names, tickets = {}, {}
for _, i in ipairs(others) do
  local key = KEYS[i]
  if not tickets[key] then
    names[#names + 1], tickets[key] = key, {}
  end
  table.insert(tickets[key], i)
end
for _, key in ipairs(names) do
  -- An error for one name must not cost the tickets of other names their leases.
  local done, all_told = pcall(renew_name, key, tickets[key])
  if not done and is_replica(all_told) then return redis.error_reply(REPLICA) end
  if not (done and all_told) then
    for _, i in ipairs(tickets[key]) do answer(i, 3, -1, -1) end
  end
end
return reply
