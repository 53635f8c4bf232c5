-- Reads or changes a counter, or the value beside a lock. If it changes something, it sends a push
-- to the clients that watch the counter or the value.
--
-- KEYS  1 the key of the counter or the value
-- ARGV  1 the request's id
--       2 what to do: 'read'
--                     'keep'   a read that also writes
--                     'add'
--                     'set'
--                     'if'     to set if the counter has a certain value
--                     'at'     to set if the counter has a certain version
--                     'write'  to write a text
--       3 for 'add', how much to add; for 'set', 'if' and 'at', the value to set; for 'write', the
--         token; else empty
--       4 for 'add', the floor, or empty; for 'if', the value; for 'at', the version; for 'write',
--         the text; else empty
--       5 the channel of the clients that watch
--       6 'SPUBLISH' in a cluster, else 'PUBLISH'
--       7 for how long the counter is kept after its last use, in seconds, or empty
--       8… the ids of changes that the server can forget
-- Reply {outcome, value, generation, version, written, remembered}, all but the first and the last as
--       text. The outcome is
--         0 carried out
--         1 kept as it is
--         2 beyond the largest value, or a text that is too long
--         3 too many changes are remembered
--       If the outcome is not 0, nothing has changed. `written` is empty if no text was written,
--       and in the reply to a change. `remembered` is how many changes of the counter the server
--       remembers, or 0 in the reply to a read.
--
-- The key is a hash. Its field 'is' has '<value> <generation> <version> <used> <room> <keep>'.
-- `used` is when the lifetime of the key was last prolonged, in seconds. `room` is how many fields
-- the key may have before the script looks for old ones. `keep` is for how many seconds the key
-- stays after its last use. A set may make it longer or shorter, and other changes only longer. The
-- field 'text' has '<token> <text>', as it was
-- written. The other fields are the changes of the last minute: id -> '<ms> <outcome> <value>
-- <generation> <version>'.
--
-- A full server refuses the first write of a change, and so all of it. If the user is denied a
-- command in the middle, the change has been carried out and is remembered. The client does not
-- take this error for a refusal.

local key = KEYS[1]
local MOST, MAX, MAX_TEXT = 5000, 9007199254740991, 1024
local MINUTE_MS, HALF_A_DAY_S, MONTH_S, HUNDRED_YEARS_S = 60000, 43200, 2592000, 3155760000

local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local seconds, now = tonumber(time[1]), math.floor(micros / 1000)

local found = redis.call('HMGET', key, 'is', 'text')
local is, written = found[1], found[2]
local value, generation, version, used, room, keep =
  string.match(is or '0 0 0 0 0 0', '^(%-?%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
-- Every number that this script writes fits into a double. With others it could not count, and what it would write then
-- is not a number any more. So they are refused before anything is written.
local is_sound = value ~= nil
for _, number in ipairs({ value, generation, version, used, room, keep }) do
  is_sound = is_sound and math.abs(tonumber(number)) <= MAX
end
is_sound = is_sound and tonumber(keep) <= HUNDRED_YEARS_S
if not is_sound then return redis.error_reply('WRONGTYPE ' .. key .. ' holds something else than a counter') end

local function put(...)
  local text = string.format('%d %d %d %d %d %d', value, generation, version, seconds, room, keep)
  redis.call('HSET', key, 'is', text, ...)
end

-- How much longer than `keep` the key stays after its lifetime was prolonged. A read prolongs it
-- only after this time. So most reads write nothing.
local function slack() return math.min(keep / 2, HALF_A_DAY_S) end

-- The fields of the key that are no changes are 'is' and, beside a lock, 'text'.
local function remembered() return redis.call('HLEN', key) - (written and 2 or 1) end

local function prolong() redis.call('PEXPIRE', key, string.format('%d', (keep + slack()) * 1000)) end

if ARGV[2] == 'read' or ARGV[2] == 'keep' then
  if is and (ARGV[2] == 'keep' or math.abs(seconds - used) > slack()) then
    prolong()
    put()
  end
  return { 0, value, generation, version, written or '', 0 }
end

local known = redis.call('HGET', key, ARGV[1])
if known then
  -- With this write, a replica that acknowledges the repetition also has the change.
  prolong()
  local outcome, then_value, then_generation, then_version = string.match(known, '^%d+ (%d) (%-?%d+) (%d+) (%d+)$')
  return { tonumber(outcome), then_value, then_generation, then_version, '', remembered() }
end

value, generation, version = tonumber(value), tonumber(generation), tonumber(version)
local outcome, after, is_set, news = 0, value, false, false
local number, bound = tonumber(ARGV[3]), tonumber(ARGV[4])
if ARGV[2] == 'write' then
  -- Tokens may have more digits than a double can keep. They are compared as text, because they
  -- have no leading zeros.
  local token, text, before = ARGV[3], ARGV[4], string.match(written or '', '^%d+') or ''
  if #text > MAX_TEXT then
    outcome = 2
  elseif #token < #before or #token == #before and token < before then
    outcome = 1
  else
    news, written = true, token .. ' ' .. text
  end
elseif math.abs(number) > MAX then
  outcome = 2
elseif ARGV[2] == 'add' then
  after = value + number
  if number < 0 and bound then after = math.max(after, math.min(bound, value)) end
  if math.abs(after) > MAX then
    outcome = 2
  elseif after == value and number ~= 0 then
    outcome = 1
  end
else
  is_set = ARGV[2] == 'set' or ARGV[2] == 'if' and value == bound or ARGV[2] == 'at' and version == bound
  if is_set then after = number else outcome = 1 end
end

local forgets = {}
for i = 8, #ARGV do
  if #ARGV[i] == 32 then forgets[#forgets + 1] = ARGV[i] end
end

-- The search for old changes looks at all fields. So the next search comes only when there are
-- twice as many fields as this one has left.
local fields = redis.call('HLEN', key) - #forgets
room = tonumber(room)
if fields >= math.max(room, 64) then
  local all, forgotten = redis.call('HGETALL', key), {}
  for _, id in ipairs(forgets) do forgotten[id] = true end
  for i = 1, #all, 2 do
    local made = tonumber(string.match(all[i + 1], '^(%d+) %d '))
    if all[i] ~= 'is' and all[i] ~= 'text' and not forgotten[all[i]] and not (made and math.abs(now - made) <= MINUTE_MS) then
      forgets[#forgets + 1] = all[i]
      fields = fields - 1
    end
  end
  if fields > MOST then return { 3, '0', '0', '0', '', fields } end
  room = 2 * fields
end

news = news or outcome == 0 and (is_set or after ~= value)
if news then
  value = after
  version = math.max(version + 1, micros)
  if is_set or generation == 0 then generation = version end
end
local stated = tonumber(ARGV[7])
if stated and news then keep = is_set and stated or math.max(keep, stated) end
if tonumber(keep) == 0 then keep = MONTH_S end
local answer = string.format('%d %d %d %d %d', now, outcome, value, generation, version)
if news and ARGV[2] == 'write' then
  put(ARGV[1], answer, 'text', written)
else
  put(ARGV[1], answer)
end
prolong()
for from = 1, #forgets, 1000 do
  redis.call('HDEL', key, unpack(forgets, from, math.min(from + 999, #forgets)))
end
if news then
  -- The message is not replicated. If a client listens at a server that has become a replica, it
  -- misses the message. It reads the counter again when it has connected to the new master.
  redis.set_repl(redis.REPL_NONE)
  if ARGV[6] == 'SPUBLISH' then
    redis.pcall('SPUBLISH', ARGV[5], '')
  else
    redis.pcall('PUBLISH', ARGV[5], '')
  end
  redis.set_repl(redis.REPL_ALL)
end
local function text(number) return string.format('%d', number) end
return { outcome, text(value), text(generation), text(version), '', remembered() }
