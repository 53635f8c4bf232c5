-- Takes a ticket. If an earlier attempt with the same id has left one, finds that ticket and renews it. Runs after
-- `ask_one.sql`, whose arguments it uses, and `line.sql`.
--
-- Rows, none if the epoch is over: the rows of the view `told`, and one row of kind 0 with:
-- - the name's key, and the ticket (null: none was taken);
-- - the outcome: 0 granted, 1 waiting, 2 busy, 3 another capacity is in use, 4 gone (the id was released before, or its
--   ticket has expired), 5 the numbers of tickets are exhausted;
-- - the other capacity;
-- - in how many µs the first of the holders expires, if the ticket is the first that waits, or if none was taken;
-- - whether another process is ahead;
-- - the id of the ticket right ahead, if it may be named: if both are of one client, and both want everything.
--
-- One transaction. The file is locked before the number is drawn, so no smaller number can appear later.

UPDATE tickets SET expires_at = (SELECT now + ttl_millis FROM asked)
WHERE id = (SELECT id FROM asked);

-- Numbers only rise: a number is above the last one, and not below the wall clock. It is also above
-- the highest number that the client has seen, in case that the file is new. But a number that the
-- client has seen is ignored if it is more than a day ahead. Otherwise one wrong clock would spoil
-- all numbers.
INSERT INTO tickets (name, ticket, id, permits, capacity, ttl_millis, expires_at, receiver, process, owner, named)
SELECT name_key, number, id, permits, capacity, ttl_millis, now + ttl_millis, receiver, process, owner,
       coalesce(names_ahead AND permits = 1073741824 AND (
           SELECT ahead.permits = 1073741824 AND ahead.receiver = asking.receiver AND ahead.process = asking.process
           FROM tickets AS ahead WHERE ahead.name = name_key ORDER BY ahead.ticket DESC LIMIT 1
       ), 0)
FROM (
    SELECT asked.*, names.key AS name_key, names.tickets AS tickets,
           (SELECT capacity FROM capacities WHERE capacities.name = asked.key) AS stored,
           max(last + 1, micros, CASE WHEN seen <= micros + 86400000000 THEN seen + 1 ELSE 0 END) AS number
    FROM asked JOIN names ON names.name = asked.key
) AS asking
WHERE number <= 9007199254740991
  AND id NOT IN (SELECT id FROM marks)
  AND id NOT IN (SELECT id FROM line)
  -- While a capacity is stored, a mutex is refused.
  AND CASE WHEN stored IS NULL THEN capacity = coalesce((SELECT capacity FROM line WHERE live LIMIT 1), capacity)
           ELSE capacity < 1073741824 END
  AND (wait AND tickets < 10000
       OR permits + coalesce((SELECT max(now_is) FROM line), 0) <= coalesce(stored, capacity)
          AND NOT EXISTS (SELECT 1 FROM line WHERE live AND now_is > limit_is));

SELECT 0 AS kind, id, name, ticket, receiver,
       CASE WHEN ticket IS NOT NULL THEN NOT holds
            WHEN gone THEN 4
            WHEN in_use IS NOT NULL THEN 3
            WHEN holds OR wait AND NOT crowded THEN 5
            ELSE 2 END AS outcome,
       in_use,
       CASE WHEN ticket IS NULL OR first THEN soonest_in END AS soonest_in,
       foreign_ahead, ahead, NULL AS soonest
FROM (
    SELECT asked.id AS id,
           names.key AS name,
           mine.ticket AS ticket,
           asked.receiver AS receiver,
           asked.wait AS wait,
           -- Without a ticket: whether it would hold.
           coalesce(
               (SELECT now_is <= limit_is FROM line WHERE line.id = asked.id AND live),
               asked.permits + coalesce((SELECT max(now_is) FROM line), 0) <= coalesce(capacities.capacity, asked.capacity)
                   AND NOT EXISTS (SELECT 1 FROM line WHERE live AND now_is > limit_is)
           ) AS holds,
           NOT EXISTS (SELECT 1 FROM line WHERE live AND now_is > limit_is AND line.id <> asked.id) AS first,
           asked.id IN (SELECT id FROM marks) OR asked.id IN (SELECT id FROM line WHERE NOT live) AS gone,
           CASE WHEN capacities.capacity IS NULL
                THEN (SELECT capacity FROM line WHERE live AND capacity <> asked.capacity LIMIT 1)
                WHEN asked.capacity >= 1073741824 THEN capacities.capacity END AS in_use,
           (SELECT (min(expires_at) - asked.now) * 1000 FROM line WHERE live AND now_is <= limit_is) AS soonest_in,
           EXISTS (SELECT 1 FROM line WHERE live AND line.process <> asked.process) AS foreign_ahead,
           -- A repetition finds the ticket that is right ahead by now.
           CASE WHEN mine.named THEN (
               SELECT CASE WHEN mine.permits = 1073741824 AND ahead.permits = 1073741824 AND ahead.receiver = mine.receiver
                                AND ahead.process = mine.process THEN ahead.id END
               FROM tickets AS ahead WHERE ahead.name = mine.name AND ahead.ticket < mine.ticket
               ORDER BY ahead.ticket DESC LIMIT 1
           ) END AS ahead,
           -- The line is too long to wait in.
           mine.ticket IS NULL AND names.tickets >= 10000 AS crowded
    FROM asked LEFT JOIN names ON names.name = asked.key LEFT JOIN tickets AS mine ON mine.id = asked.id
         LEFT JOIN capacities ON capacities.name = asked.key
)
UNION ALL
SELECT kind, id, NULL, ticket, receiver, NULL, NULL, NULL, NULL, NULL, soonest
FROM told;

COMMIT;
