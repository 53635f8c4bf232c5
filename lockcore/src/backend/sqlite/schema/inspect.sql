-- Lists the live tickets of a name, oldest first. Reads only.
--
-- ?1 key of the name   ?2 now in ms of the boot clock   ?3 now in µs of the wall clock
-- Rows: ticket, whether it holds, permits, capacity that counts, µs that it lives, its
-- age in µs, owner with the ask behind it, id
--
-- The number of a ticket is usually the time of its enqueue in µs. It is a little more if many tickets are taken in one
-- µs.

SELECT ticket,
       ticket <= coalesce(through, 0)
       OR sum(permits) OVER (ORDER BY ticket ROWS UNBOUNDED PRECEDING) <= coalesce(stored, capacity) AS granted,
       permits, coalesce(stored, capacity) AS capacity, (expires_at - ?2) * 1000 AS remaining,
       max(?3 - ticket, 0) AS age, owner, id
FROM (
    SELECT tickets.*, capacities.capacity AS stored, capacities.through AS through
    FROM tickets LEFT JOIN capacities ON capacities.name = ?1
    WHERE tickets.name = (SELECT key FROM names WHERE name = ?1) AND expires_at > ?2
)
ORDER BY ticket;
