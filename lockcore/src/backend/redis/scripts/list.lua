-- Lists names in use, with one step of a SCAN over all keys of the database.
--
-- ARGV  1 the cursor of SCAN, '0' at the beginning   2 pattern of the keys
--       3 about how many keys to look at
-- Reply the next cursor, '0' at the end; then the keys of names that have a holder or a waiter
--
-- The script only reads. It declares no keys, because it does not know them before the SCAN. A
-- waiter behind other tickets counts even if it has expired.

-- include record.lua

local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local reply, now = { step[1] }, clock()
for _, key in ipairs(step[2]) do
  -- The key may have been deleted in the meantime. It may have another type, or have been moved to
  -- another node.
  local was, used = redis.pcall('GET', key), false
  local is_line = type(was) == 'string' and string.byte(was, 17) == 76 -- 'L'
  local is_resized = type(was) == 'string' and string.byte(was, 17) == 82 -- 'R'
  if is_line or is_resized then
    used = string.sub(was, 57, 66) ~= '0000000000' or string.sub(was, 31, 43) ~= string.sub(was, 44, 56)
    -- A key with a stored capacity does not expire, but its tickets do. So the script reads the
    -- tickets.
    if used and is_resized then
      used = (end_of(was, 118) or 0) > now or redis.pcall('EXISTS', key .. ':line') == 1
    end
  elseif type(was) == 'string' and #was > 16 then
    used = (end_of(was) or 0) > now
  end
  if used then reply[#reply + 1] = key end
end
return reply
