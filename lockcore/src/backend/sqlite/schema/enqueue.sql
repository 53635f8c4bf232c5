-- Takes a ticket, or finds the one that an earlier try with the same id left and renews it. After `ask_one.sql`, whose
-- arguments it has, and `line.sql`.
--
-- Rows: one of kind 0, none if the epoch is over: the name's key, ticket (null: none was taken), its permits (fewer than
-- asked for, if it was made smaller since), permits of the live tickets before it (or as many of them as exceed the
-- capacity), `gone` (released before, or expired), another capacity in use, when the first of the holders expires,
-- whether another process is ahead, whether the line is too long to wait in; and those of the view `told`.
--
-- One transaction. The row of the name was locked before the number is drawn (H29).

UPDATE tickets SET expires_at = (SELECT now + ttl_millis FROM asked)
WHERE id = (SELECT id FROM asked);

-- Numbers only rise: over the last one drawn, over the wall clock, and over what the client has seen if the file is
-- new; the last not beyond a day, or one wrong clock would poison all.
INSERT INTO tickets (name, ticket, id, permits, capacity, ttl_millis, expires_at, receiver, process, owner)
SELECT name_key, number, id, permits, capacity, ttl_millis, now + ttl_millis, receiver, process, owner
FROM (
    SELECT asked.*, names.key AS name_key, names.tickets AS tickets,
           max(last + 1, micros, CASE WHEN seen <= micros + 86400000000 THEN seen + 1 ELSE 0 END) AS number
    FROM asked JOIN names ON names.name = asked.key
)
WHERE number <= 9007199254740991
  AND id NOT IN (SELECT id FROM marks)
  AND id NOT IN (SELECT id FROM line)
  AND capacity = coalesce((SELECT capacity FROM line WHERE live LIMIT 1), capacity)
  AND (wait AND tickets < 10000
       OR permits + coalesce((SELECT max(now_is) FROM line), 0) <= capacity);

SELECT 0 AS kind,
       asked.id AS id,
       names.key AS name,
       mine.ticket AS ticket,
       asked.receiver AS receiver,
       coalesce(mine.permits, asked.permits) AS permits,
       coalesce(
           (SELECT now_is - line.permits FROM line WHERE line.id = asked.id AND live),
           (SELECT max(now_is) FROM line),
           0
       ) AS older,
       asked.id IN (SELECT id FROM marks) OR asked.id IN (SELECT id FROM line WHERE NOT live) AS gone,
       (SELECT capacity FROM line WHERE live AND capacity <> asked.capacity LIMIT 1) AS in_use,
       (SELECT min(expires_at) FROM line WHERE live AND now_is <= capacity) AS soonest,
       EXISTS (SELECT 1 FROM line WHERE live AND line.process <> asked.process) AS foreign_ahead,
       mine.ticket IS NULL AND names.tickets >= 10000 AS crowded
FROM asked LEFT JOIN names ON names.name = asked.key LEFT JOIN tickets AS mine ON mine.id = asked.id
UNION ALL
SELECT kind, id, NULL, ticket, receiver, NULL, NULL, NULL, NULL, soonest, NULL, NULL
FROM told;

COMMIT;
