-- Lists the live tickets of a name, oldest first. Reads only.
--
-- ?1 key of the name   ?2 now in ms of the boot clock
-- Rows: ticket, whether it holds, permits, capacity that counts, ms that it lives, owner with the ask behind it, id

SELECT ticket,
       ticket <= coalesce(through, 0)
       OR sum(permits) OVER (ORDER BY ticket ROWS UNBOUNDED PRECEDING) <= coalesce(stored, capacity) AS granted,
       permits, coalesce(stored, capacity) AS capacity, expires_at - ?2 AS remaining, owner, id
FROM (
    SELECT tickets.*, capacities.capacity AS stored, capacities.through AS through
    FROM tickets LEFT JOIN capacities ON capacities.name = ?1
    WHERE tickets.name = (SELECT key FROM names WHERE name = ?1) AND expires_at > ?2
)
ORDER BY ticket;
