-- Lists names in use, with one step of a SCAN over all keys of the database.
--
-- ARGV  1 the cursor of SCAN, '0' at the beginning   2 pattern of the keys
--       3 about how many keys to look at
-- Reply the next cursor, '0' at the end; then the keys of names that have a holder or a waiter
--
-- The script only reads. It declares no keys, because it does not know them before the SCAN. A line
-- with more than 16 places counts as in use, even if all its waiters have expired.

-- include fields.lua

-- Whether any ticket of a line is alive: the single holder, whose record is behind the first `at`
-- bytes of the state, one of several holders, or a waiter.
local function is_alive(key, was, at, now)
  if (end_of(was, at) or 0) > now then return true end
  if #was == at and string.sub(was, 57, 66) ~= '0000000000' then
    local last = redis.pcall('ZRANGE', key .. ':ends', '-1', '-1', 'WITHSCORES')
    -- If there are no ends, they were evicted: see soonest() in line.lua.
    if not last[2] or tonumber(last[2]) > now then return true end
  end
  local head, next = tonumber(string.sub(was, 31, 43)), tonumber(string.sub(was, 44, 56))
  if not head or not next or head >= next then return false end
  if next - head > 16 then return true end
  local places = {}
  for place = head, next - 1 do places[#places + 1] = string.format('%013d', place) end
  for _, record in ipairs(redis.pcall('HMGET', key .. ':line', unpack(places))) do
    if record and (end_of(record) or 0) > now then return true end
  end
  return false
end

local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local reply, now = { step[1] }, clock()
for _, key in ipairs(step[2]) do
  -- The key may have been deleted in the meantime. It may have another type, or have been moved to
  -- another node.
  local was, used = redis.pcall('GET', key), false
  local is_line = type(was) == 'string' and string.byte(was, 17) == 76 -- 'L'
  local is_resized = type(was) == 'string' and string.byte(was, 17) == 82 -- 'R'
  if is_line or is_resized then
    used = is_alive(key, was, is_line and 76 or 118, now)
  elseif type(was) == 'string' and #was > 16 then
    used = (end_of(was) or 0) > now
  end
  if used then reply[#reply + 1] = key end
end
return reply
