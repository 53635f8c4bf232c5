-- Prolongs tickets to their ttl from now, and makes those smaller that are to keep fewer permits. Never creates one.
-- After `ask_many.sql`, whose arguments it has, and `line.sql`.
--
-- Rows, none if the epoch is over: one of kind 0 for each id: ticket (null: lost), ttl in ms, permits of it and all older
-- live ones, its own, the capacity, when the first of the holders expires (if it is the first in line), whether another
-- process is ahead; and one of kind 1 for each other ticket of this process that holds newly: id, ticket, receiver.
--
-- One transaction, whatever the number of ids.

UPDATE tickets SET (expires_at, permits) = (
    SELECT asked.now + tickets.ttl_millis, min(tickets.permits, asked.keeps) FROM asked WHERE asked.id = tickets.id
)
WHERE id IN (SELECT id FROM asked);

SELECT 0 AS kind, asked.id AS id, tickets.ticket AS ticket, tickets.receiver AS receiver,
       tickets.ttl_millis AS ttl_millis, line.now_is AS now_is, line.permits AS permits, line.capacity AS capacity,
       CASE WHEN line.now_is > line.capacity AND line.now_is - line.permits <= line.capacity THEN (
           SELECT min(t.expires_at) FROM line AS holder JOIN tickets AS t ON t.id = holder.id
           WHERE holder.name = line.name AND holder.live AND holder.now_is <= holder.capacity
       ) END AS soonest,
       line.foreign_ahead AS foreign_ahead
FROM asked LEFT JOIN tickets ON tickets.id = asked.id LEFT JOIN line ON line.id = tickets.id
UNION ALL
SELECT 1, id, ticket, receiver, NULL, NULL, NULL, NULL, NULL, NULL
FROM line
WHERE live AND was > capacity AND now_is <= capacity AND process = (SELECT process FROM asked LIMIT 1)
  AND id NOT IN (SELECT id FROM asked);

COMMIT;
