-- Forgets what remains of a name that nobody uses.
--
-- KEYS  1 tickets, 2 queue
-- Reply 1 forgotten, 0 in use
if redis.call('HLEN', KEYS[1]) > 1 then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
