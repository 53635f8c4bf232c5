-- Fills `line` with the relevant part of the lines of the requests, and removes tickets from these
-- lines. Runs after `asked` is filled.
--
-- Of each line, `line` has: the front, which is the holders and the first waiter; the tickets to
-- remove; and the tickets of the requests. Waiters behind the first are not read, however many
-- there are.
--
-- A ticket holds when the permits of all older live tickets plus its own (`now_is`) are at most its
-- limit (`limit_is`). The limit is the stored capacity, or else the capacity of the ticket. A
-- ticket that held when the capacity was changed has no limit. A ticket holds *newly* if it did not
-- hold before this request: then `was` was above `limit_was`. A waiter is *newly* the first one if
-- there were other waiters in front of it before. `limit_was` and `limit_is` differ only if this
-- request changes the capacity.

DELETE FROM line;

INSERT INTO line
WITH RECURSIVE front (
    name, ticket, id, permits, keeps, capacity, expires_at, receiver, process, live, older_was, older_is,
    limit_was, limit_is, stored, through, sets, resizes
) AS (
    SELECT name, -1, NULL, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, 0, 0, stored, coalesce(through, 0), sets, resizes
    FROM (
        SELECT line.name AS name, capacities.capacity AS stored, capacities.through AS through,
               (SELECT capacity FROM asked WHERE resizes) AS sets,
               EXISTS (SELECT 1 FROM asked WHERE resizes) AS resizes
        FROM (
            SELECT names.key AS name FROM names WHERE names.name IN (SELECT key FROM asked)
            UNION
            SELECT mine.name FROM tickets AS mine WHERE mine.id IN (SELECT id FROM asked)
        ) AS line
        JOIN names ON names.key = line.name
        LEFT JOIN capacities ON capacities.name = names.name
    )
    UNION ALL
    SELECT next.name, next.ticket, next.id, next.permits, min(next.permits, coalesce(asked.keeps, next.permits)),
           next.capacity, next.expires_at, next.receiver, next.process,
           next.expires_at > (SELECT now FROM asked LIMIT 1) AND asked.leaves IS NOT TRUE,
           front.older_was + front.permits, front.older_is + front.keeps * front.live,
           CASE WHEN next.ticket <= front.through THEN 9007199254740991
                ELSE coalesce(front.stored, next.capacity) END,
           CASE WHEN next.ticket <= front.through THEN 9007199254740991
                WHEN NOT front.resizes THEN coalesce(front.stored, next.capacity)
                WHEN front.older_was + front.permits + next.permits <= coalesce(front.stored, next.capacity)
                    THEN 9007199254740991
                ELSE coalesce(front.sets, next.capacity) END,
           front.stored, front.through, front.sets, front.resizes
    FROM front
    JOIN tickets AS next ON next.name = front.name AND next.ticket = (
        SELECT ticket FROM tickets WHERE tickets.name = front.name AND tickets.ticket > front.ticket
        ORDER BY tickets.ticket LIMIT 1
    )
    LEFT JOIN asked ON asked.id = next.id
    WHERE NOT (front.live AND front.older_is + front.keeps > front.limit_is)
)
SELECT name, ticket, id, keeps, capacity, expires_at, receiver, process, live,
       older_was, older_was + permits, older_is + keeps * live, limit_was, limit_is
FROM front WHERE ticket >= 0;

-- By now `line` has a row of each name that has tickets. This adds the expired tickets behind the
-- front, and the tickets of the requests.
INSERT OR IGNORE INTO line
SELECT name, ticket, id, permits, capacity, expires_at, receiver, process, 0, NULL, NULL, NULL, NULL, NULL
FROM tickets
WHERE name IN (SELECT name FROM line) AND expires_at <= (SELECT now FROM asked LIMIT 1)
UNION ALL
SELECT name, ticket, tickets.id, min(tickets.permits, coalesce(asked.keeps, tickets.permits)), tickets.capacity,
       expires_at, tickets.receiver, tickets.process, expires_at > now AND NOT leaves,
       NULL, NULL, NULL, NULL, NULL
FROM asked CROSS JOIN tickets ON tickets.id = asked.id; -- In this order, or the whole table is read.

-- These rows are deleted before other tickets are granted in their place. A later renewal may have
-- read its clock before this transaction locked the file. It must not find a ticket alive that this
-- transaction has taken for dead.
DELETE FROM tickets WHERE id IN (SELECT id FROM line WHERE NOT live);

-- If this request grants a ticket of another process, that process must find the grant by itself. A
-- dead process does not find it. So such a grant ends after two seconds, and not only after its
-- whole ttl. If the ticket ahead was named to the client, the client may believe by now that its
-- ticket holds. So such a lease is not shortened, and if that process is dead, others wait for up to
-- the whole ttl.
UPDATE tickets SET expires_at = min(expires_at, (SELECT now + 2000 FROM asked LIMIT 1))
WHERE id IN (
    SELECT id FROM line
    WHERE live AND was > limit_was AND now_is <= limit_is AND process <> (SELECT process FROM asked LIMIT 1)
) AND NOT named;
