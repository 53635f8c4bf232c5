-- Lists names that have a live ticket, in the order of their keys, and sums up their lines. Reads only.
--
-- ?1 to ?5 as in `list.sql`   ?6 now in µs of the wall clock
-- Rows: the key of the name; how many tickets hold; how many wait; the owner with the ask behind it of the oldest
-- ticket that holds; its age in µs; the greatest age of the tickets that wait
--
-- All tickets of a line are read for this, so a line with more than 100 is not summed up. The other lines are summed up
-- until 4000 tickets are read, the shortest first. The remaining names have nulls.

WITH page AS (
    SELECT key, name, tickets
    FROM names
    WHERE name >= ?1 AND name > ?2 AND name < ?5
      AND tickets > 0
      AND EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key AND expires_at > ?4)
    ORDER BY name LIMIT ?3
), sums AS (
    SELECT page.*, sum(tickets) OVER (ORDER BY tickets ROWS UNBOUNDED PRECEDING) AS up_to_here FROM page
), places AS (
    SELECT sums.key AS key, ticket,
           ticket <= coalesce(through, 0)
           OR sum(permits) OVER (PARTITION BY sums.key ORDER BY ticket ROWS UNBOUNDED PRECEDING)
               <= coalesce(capacities.capacity, tickets.capacity) AS granted
    FROM sums
    JOIN tickets ON tickets.name = sums.key
    LEFT JOIN capacities ON capacities.name = sums.name
    WHERE sums.tickets <= 100 AND up_to_here <= 4000 AND expires_at > ?4
), lines AS (
    SELECT key, sum(granted) AS holders, sum(NOT granted) AS waiters,
           min(CASE WHEN granted THEN ticket END) AS holder, min(CASE WHEN NOT granted THEN ticket END) AS waiter
    FROM places GROUP BY key
)
SELECT page.name AS name, holders, waiters,
       (SELECT owner FROM tickets WHERE tickets.name = lines.key AND ticket = holder) AS owner,
       max(?6 - holder, 0) AS since, max(?6 - waiter, 0) AS longest_wait
FROM page LEFT JOIN lines ON lines.key = page.key
ORDER BY page.name;
