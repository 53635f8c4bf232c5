-- Lists the commands of the other scripts that the user may not run. Checks whether the server can
-- run these scripts at all.
--
-- ARGV  1 a key and 2 a channel of the namespace; the script touches neither
-- Reply the names of the denied commands.
--       Empty before Redis 7, because such a server cannot check this.
--       If the user may run no command with a key on this key, the reply leaves all of these
--       commands out: the user may have rights on other keys of the namespace.
--       An error on a server that cannot run the other scripts.
--
-- Each call is written out with all its arguments: Redis 7.0 crashes when it is asked about a SET
-- without them.

if string.format('%d', 2^52) ~= '4503599627370496' then
  return redis.error_reply('UNFIT this server counts to 31 bits; use a 64-bit Redis or Valkey')
end
-- Redis has this function since 3.2. A server that only speaks the protocol of Redis may not have
-- it.
if not redis.set_repl then
  return redis.error_reply('UNFIT this server has no redis.set_repl for scripts; update it to Redis 6 or later, or to Valkey')
end

local key, channel = ARGV[1], ARGV[2]
local with_key = {
  { 'DEL', key },
  { 'EXISTS', key },
  { 'GET', key },
  { 'HDEL', key, 'id' },
  { 'HGET', key, 'id' },
  { 'HGETALL', key },
  { 'HLEN', key },
  { 'HMGET', key, 'id', 'place' },
  { 'HSET', key, 'id', 'record' },
  { 'PEXPIRE', key, '1' },
  { 'SET', key, '', 'PX', '1' },
  { 'ZADD', key, '1', 'id' },
  { 'ZCARD', key },
  { 'ZRANGE', key, '0', '0' },
  { 'ZRANGEBYSCORE', key, '-inf', '1' },
  { 'ZREM', key, 'id' },
}
local without = { { 'TIME' } }
if string.sub(channel, -1) == '}' then
  without[2] = { 'SPUBLISH', channel, 'message' }
  without[3] = { 'SSUBSCRIBE', channel }
  without[4] = { 'SUNSUBSCRIBE', channel }
  without[5] = { 'ASKING' }
else
  without[2] = { 'PUBLISH', channel, 'message' }
end

local function denied(calls)
  local names = {}
  for _, call in ipairs(calls) do
    if not redis.acl_check_cmd(unpack(call)) then names[#names + 1] = call[1] end
  end
  return names
end

if not redis.acl_check_cmd then return {} end
local names = denied(without)
local more = denied(with_key)
if #more < #with_key then
  for _, name in ipairs(more) do names[#names + 1] = name end
end
return names
