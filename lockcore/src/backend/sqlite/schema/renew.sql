-- Extends tickets to the requested ttl, counted from now, and reduces the permits of tickets that are to keep fewer.
-- Never creates a ticket. Runs after `ask_many.sql`, whose arguments it uses, and `line.sql`.
--
-- Rows, none if the epoch is over: the rows of the view `told`, and for each id one of kind 0 with:
-- - the name's key, the ticket (null: lost), the ttl in µs, and whether the ticket holds;
-- - in how many µs the first of the holders expires, if the ticket is the first in line;
-- - whether another process is ahead;
-- - the owner, if somebody asks for the ticket (`ask_back.sql`).
--
-- One transaction, whatever the number of ids.

UPDATE tickets SET (expires_at, ttl_millis, permits) = (
    SELECT asked.now + coalesce(asked.ttl_millis, tickets.ttl_millis),
           coalesce(asked.ttl_millis, tickets.ttl_millis),
           min(tickets.permits, asked.keeps)
    FROM asked WHERE asked.id = tickets.id
)
WHERE id IN (SELECT id FROM asked);

SELECT 0 AS kind, asked.id AS id, tickets.name AS name, tickets.ticket AS ticket, tickets.receiver AS receiver,
       tickets.ttl_millis * 1000 AS ttl,
       coalesce(line.now_is <= line.limit_is, 0) AS holds,
       CASE WHEN line.now_is > line.limit_is THEN (
           SELECT (min(t.expires_at) - asked.now) * 1000 FROM line AS holder CROSS JOIN tickets AS t ON t.id = holder.id
           WHERE holder.name = line.name AND holder.live AND holder.now_is <= holder.limit_is
       ) END AS soonest_in,
       EXISTS (
           SELECT 1 FROM line AS ahead
           WHERE ahead.name = tickets.name AND ahead.live AND ahead.process <> asked.process
       ) AS foreign_ahead,
       CASE WHEN instr(tickets.owner, char(10)) THEN tickets.owner END AS owner, NULL AS soonest
FROM asked
LEFT JOIN tickets ON tickets.id = asked.id
LEFT JOIN line ON line.name = tickets.name AND line.ticket = tickets.ticket
UNION ALL
SELECT kind, id, NULL, ticket, receiver, NULL, NULL, NULL, NULL, NULL, soonest
FROM told;

COMMIT;
