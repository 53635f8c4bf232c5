-- Writes something that leaves nothing, so that a client can ask whether a write counts.
--
-- KEYS  1 a key of the namespace that no name has
-- Reply 0
--
-- Nobody sees the key: a script is one atomic step. Replicas and the log get both writes.

redis.call('SET', KEYS[1], '', 'PX', '1000')
redis.call('DEL', KEYS[1])
return 0
