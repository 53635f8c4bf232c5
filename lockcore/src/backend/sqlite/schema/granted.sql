-- Which of these waiting tickets hold, because another process has left. Reads only: what has expired counts as if it
-- were there, until somebody removes it.
--
-- ?1 JSON object, the ids its keys
-- Rows: id

SELECT id FROM (
    SELECT id, capacity, sum(permits) OVER (PARTITION BY name ORDER BY ticket ROWS UNBOUNDED PRECEDING) AS so_far
    FROM tickets
    WHERE name IN (SELECT name FROM tickets WHERE id IN (SELECT key FROM json_each(?1)))
)
WHERE so_far <= capacity AND id IN (SELECT key FROM json_each(?1));
