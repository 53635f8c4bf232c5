-- The relevant part of the lines in question, and the tickets to remove from them. Runs after `asked` is filled.
--
-- Of each line, this has: the front, which is the holders and the first waiter; the tickets to remove; and the tickets
-- of the requests. Waiters behind the first are not read, however many there are.
--
-- A ticket holds when the permits of all older live tickets plus its own (`now_is`) are at most the capacity. It holds
-- *newly* if that was not so before (`was`). A waiter is *newly* the first one if there were others in front of it
-- before.

DELETE FROM line;

INSERT INTO line
WITH RECURSIVE front (
    name, ticket, id, permits, keeps, capacity, expires_at, receiver, process, live, older_was, older_is
) AS (
    SELECT name, -1, NULL, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0
    FROM (
        SELECT names.key AS name FROM names WHERE names.name IN (SELECT key FROM asked)
        UNION
        SELECT mine.name FROM tickets AS mine WHERE mine.id IN (SELECT id FROM asked)
    )
    UNION ALL
    SELECT next.name, next.ticket, next.id, next.permits, min(next.permits, coalesce(asked.keeps, next.permits)),
           next.capacity, next.expires_at, next.receiver, next.process,
           next.expires_at > (SELECT now FROM asked LIMIT 1) AND asked.leaves IS NOT TRUE,
           front.older_was + front.permits, front.older_is + front.keeps * front.live
    FROM front
    JOIN tickets AS next ON next.name = front.name AND next.ticket = (
        SELECT ticket FROM tickets WHERE tickets.name = front.name AND tickets.ticket > front.ticket
        ORDER BY tickets.ticket LIMIT 1
    )
    LEFT JOIN asked ON asked.id = next.id
    WHERE NOT (front.live AND front.older_is + front.keeps > front.capacity)
)
SELECT name, ticket, id, keeps, capacity, expires_at, receiver, process, live,
       older_was, older_was + permits, older_is + keeps * live
FROM front WHERE ticket >= 0;

-- Each name that has tickets is in `line` by now.
INSERT OR IGNORE INTO line
SELECT name, ticket, id, permits, capacity, expires_at, receiver, process, 0, NULL, NULL, NULL
FROM tickets
WHERE name IN (SELECT name FROM line) AND expires_at <= (SELECT now FROM asked LIMIT 1)
UNION ALL
SELECT name, ticket, tickets.id, min(tickets.permits, coalesce(asked.keeps, tickets.permits)), tickets.capacity,
       expires_at, tickets.receiver, tickets.process, expires_at > now AND NOT leaves, NULL, NULL, NULL
FROM asked CROSS JOIN tickets ON tickets.id = asked.id; -- In this order, or the whole table is read.

-- The rows are deleted before another ticket is granted because of it. A renewal may have read its clock before this
-- transaction had the file, and it must not find a ticket alive that was already taken for dead.
DELETE FROM tickets WHERE id IN (SELECT id FROM line WHERE NOT live);

-- Another process must find its grant by itself. If it is dead it does not, so the grant ends after two seconds, and
-- not only after its whole ttl.
UPDATE tickets SET expires_at = min(expires_at, (SELECT now + 2000 FROM asked LIMIT 1))
WHERE id IN (
    SELECT id FROM line
    WHERE live AND was > capacity AND now_is <= capacity AND process <> (SELECT process FROM asked LIMIT 1)
);
