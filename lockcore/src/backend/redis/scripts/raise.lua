-- Tells a server the number of a ticket. This is for a quorum: each of its servers has assigned a
-- number to the same request, and one of these is the number of the ticket.
--
-- KEYS  1 the name's key
-- ARGV  1 the number, in 16 digits
--       2 the id of the request's ticket at this server
-- Reply 1 the ticket has the number, and all later numbers are greater
--       0 the number is more than a day ahead of this server's clock; nothing was done
--       2 the ticket is gone; nothing was done
--
-- The limit of a day is the one that enqueue.lua has for a number that a client has seen. Without
-- it, one wrong clock would make the numbers of all servers too great.
--
-- If the user is denied a command in the middle: in the fast path there is only one write. The
-- other cases are explained at put_down() in line.lua.

local key, number, id = KEYS[1], ARGV[1], ARGV[2]
local was = redis.call('GET', key)
if not was then return 2 end

-- include fields.lua

local now = clock()
local DAY = 86400000
if number / 1000 > now + DAY then return 0 end

-- The record gets the number from the client. If this server has assigned a greater number, the
-- greater one stays the last number of the name.
local function told(record)
  return number .. string.format('%013d', end_of(record)) .. string.sub(record, ID, CAPACITY_END) .. '=' .. string.sub(record, CHANNEL)
end

-- The most frequent case: the ticket is the only one.
if string.sub(was, ID, ID_END) == id and string.sub(was, LAST, LAST_END) <= number and end_of(was) then
  redis.call('SET', key, told(was), 'PX', string.format('%d', DAY + math.max(0, number / 1000 - now)))
  return 1
end

-- include line.lua

local line = read(key, was, now)
if line.err then return line end
if line.out == 0 and line.head == line.next then return 2 end
local found = settle(line, {}, function()
  local record, place = find(line, id)
  if not record then return 2 end
  change(line, place, id, told(record))
  if number > line.last then line.last = number end
  line.raise = true
  return 1
end)
return line.denied or found
