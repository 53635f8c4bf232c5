-- Writes a key and deletes it, so that a client can check whether a write counts.
--
-- KEYS  1 a key of the namespace that no name has
-- Reply 0
--
-- No other client sees the key, because a script is one atomic step. Replicas and the log receive
-- both writes.

redis.call('SET', KEYS[1], '', 'PX', '1000')
redis.call('DEL', KEYS[1])
return 0
