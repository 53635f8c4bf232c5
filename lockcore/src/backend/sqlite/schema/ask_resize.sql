-- The beginning of a change of a stored capacity: locks the file, and notes the request and its outcome.
--
-- ?1 id of the change   ?2 key of the name   ?3 capacity from then on, or null   ?4 the last change that was read, or null
-- ?5 the capacity that the caller states. If none is stored, the oldest ticket must have it. If
--    none is to be stored any more, all tickets must have it.
--
-- In `asked`, `resizes` is 1 if the change is to be made, and `capacity` is the new capacity. If a
-- ticket with another capacity forbids the change, `permits` is the capacity of that ticket. If the
-- epoch is over, no request is noted.

BEGIN IMMEDIATE;

DELETE FROM asked;

INSERT INTO asked (id, key, permits, capacity, resizes, leaves, marks, now, micros, process)
SELECT ?1, ?2, other, ?3, last IS ?4 AND last IS NOT ?1 AND other IS NULL, 0, 0, ?6, ?7, ?8
FROM (
    SELECT last, CASE
        WHEN stored IS NULL THEN (
            SELECT nullif(capacity, ?5) FROM tickets WHERE name = line AND expires_at > ?6 ORDER BY ticket LIMIT 1
        )
        WHEN ?3 IS NULL THEN (
            SELECT capacity FROM tickets WHERE name = line AND expires_at > ?6 AND capacity <> ?5
            ORDER BY ticket LIMIT 1
        )
    END AS other
    FROM (
        SELECT capacities.capacity AS stored, capacities.change AS last,
               (SELECT key FROM names WHERE name = ?2) AS line
        FROM store LEFT JOIN capacities ON capacities.name = ?2
        WHERE epoch = ?9
    )
);
