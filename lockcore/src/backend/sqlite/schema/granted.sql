-- Finds the tickets of this process that hold in these lines, and the first waiter of a line if it
-- is of this process. This is run when another process has changed the file. Reads only: an expired
-- ticket counts as live until a request removes it.
--
-- ?1 JSON array of the keys of names   ?2 process
-- Rows: id, receiver, whether it holds, when the first of the tickets before it expires

WITH RECURSIVE front (
    name, ticket, id, permits, limit_is, expires_at, receiver, process, older, soonest, stored, through
) AS (
    SELECT value, -1, NULL, 0, 0, NULL, NULL, NULL, 0, NULL, capacities.capacity, coalesce(capacities.through, 0)
    FROM json_each(?1)
    JOIN names ON names.key = value
    LEFT JOIN capacities ON capacities.name = names.name
    UNION ALL
    SELECT next.name, next.ticket, next.id, next.permits,
           CASE WHEN next.ticket <= front.through THEN 9007199254740991
                ELSE coalesce(front.stored, next.capacity) END,
           next.expires_at, next.receiver, next.process,
           front.older + front.permits,
           coalesce(min(front.soonest, front.expires_at), front.soonest, front.expires_at),
           front.stored, front.through
    FROM front
    JOIN tickets AS next ON next.name = front.name AND next.ticket = (
        SELECT ticket FROM tickets WHERE tickets.name = front.name AND tickets.ticket > front.ticket
        ORDER BY tickets.ticket LIMIT 1
    )
    WHERE front.older + front.permits <= front.limit_is
)
SELECT id, receiver, older + permits <= limit_is AS holds, soonest FROM front WHERE process = ?2;
