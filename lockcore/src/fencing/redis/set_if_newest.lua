-- Sets a value, unless a higher token has set it before. Comes after check.lua in the script.
--
-- KEYS  1 the value    2 its fence; in a cluster both in one slot, as order:{42} and order:{42}:fence
-- ARGV  1 token        2 the value    3 how long the fence is remembered, in ms; '0' for ever
-- Reply 1 set, 0 refused
--
-- Atomic as every script. The first write is a SET, which a server without free memory refuses. So
-- such a server refuses the whole script.

if not fence(KEYS[2], ARGV[1], ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
