-- Lists the live tickets of a name, oldest first. Reads only.
--
-- ?1 key of the name   ?2 now in ms of the boot clock
-- Rows: ticket, whether it holds, permits, capacity, ms that it lives, owner with the ask behind it, id

SELECT ticket,
       sum(permits) OVER (ORDER BY ticket ROWS UNBOUNDED PRECEDING) <= capacity AS granted,
       permits, capacity, expires_at - ?2 AS remaining, owner, id
FROM tickets
WHERE name = (SELECT key FROM names WHERE name = ?1) AND expires_at > ?2
ORDER BY ticket;
