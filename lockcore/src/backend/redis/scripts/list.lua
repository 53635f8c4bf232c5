-- Lists names in use, with one step of a SCAN over all keys of the database.
--
-- ARGV  1 the cursor of SCAN, '0' at the beginning   2 pattern of the keys
--       3 about how many keys to look at
--       4 how many rows a line may have to be in the reply; 0 for no lines
-- Reply {the next cursor, '0' at the end; now in ms; names}. A name that has a holder or a waiter is
--       {its key, and its tickets in the form of tickets.lua}, or only {its key}
--
-- The script only reads. It declares no keys, because it does not know them before the SCAN. A line
-- counts as in use, even if all its waiters have expired, if it has more than 16 places, or more than
-- `left`.

-- include tickets.lua
-- include fields.lua

-- So many rows are read for all lines of a page, so that the server serves others soon.
local left = 4096

-- Whether any ticket of a line is alive: the single holder, whose record is behind the first `at`
-- bytes of the state, one of several holders, or a waiter.
local function is_alive(key, was, at, now)
  if (end_of(was, at) or 0) > now then return true end
  if #was == at and string.sub(was, OUT, OUT_END) ~= '0000000000' then
    local last = redis.pcall('ZRANGE', key .. ':ends', '-1', '-1', 'WITHSCORES')
    -- If there are no ends, they were evicted: see soonest() in line.lua.
    if not last[2] or tonumber(last[2]) > now then return true end
  end
  local head, next = tonumber(string.sub(was, HEAD, HEAD_END)), tonumber(string.sub(was, NEXT, NEXT_END))
  if not head or not next or head >= next then return false end
  if next - head > 16 or next - head > left then return true end
  left = left - (next - head)
  local places = {}
  for place = head, next - 1 do places[#places + 1] = string.format('%013d', place) end
  for _, record in ipairs(redis.pcall('HMGET', key .. ':line', unpack(places))) do
    if record and (end_of(record) or 0) > now then return true end
  end
  return false
end

-- Adds the tickets to a name in the reply, if they are few.
local function add_line(name, was, at, stored)
  local key = name[1]
  local rows = redis.pcall('HLEN', key .. ':line')
  if type(rows) ~= 'number' or rows > tonumber(ARGV[4]) or rows > left then return end
  left = left - rows
  rows = redis.pcall('HGETALL', key .. ':line')
  local solo = #was > at and string.sub(was, at + 1) or nil
  if rows == 0 and not solo then return end -- the rows were evicted
  add_tickets(name, rows, tonumber(string.sub(was, HEAD, HEAD_END)), tonumber(string.sub(was, OUT, OUT_END)), solo, stored)
end

local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local names, now = {}, clock()
for _, key in ipairs(step[2]) do
  -- The key may have been deleted in the meantime. It may have another type, or have been moved to
  -- another node.
  local was, name = redis.pcall('GET', key), { key }
  local is_line = type(was) == 'string' and string.byte(was, FORM) == 76 -- 'L'
  local is_resized = type(was) == 'string' and string.byte(was, FORM) == 82 -- 'R'
  local used = false
  if is_line or is_resized then
    local at = is_line and OF_END or CHANGE_END
    used = is_alive(key, was, at, now)
    if used and ARGV[4] ~= '0' then
      add_line(name, was, at, is_resized and tonumber(string.sub(was, STORED, STORED_END)))
    end
  elseif type(was) == 'string' and #was > LAST_END then
    used = (end_of(was) or 0) > now
    if ARGV[4] ~= '0' then add_tickets(name, nil, 1, 0, was) end
  end
  if used then names[#names + 1] = name end
end
return { step[1], now, names }
