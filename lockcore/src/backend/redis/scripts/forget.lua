-- Forgets what remains of a name that nobody uses.
--
-- KEYS  1 tickets, 2 queue
-- Reply 1 forgotten, 0 in use
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('DEL', KEYS[1])
return 1
