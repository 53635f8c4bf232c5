-- The lines of the names in question, as far as they matter, and whoever has to go from them. After `asked` is filled.
--
-- Of each line: those that hold or go, those that are asked for, and the first that waits.
-- A ticket holds when the permits of all older live tickets plus its own (`now_is`) are at most the capacity; it holds
-- *newly* when that was not so before (`was`).

DELETE FROM line;

INSERT INTO line
SELECT name, ticket, id, keeps, capacity, expires_at, receiver, process, live, was, now_is, foreign_ahead
FROM (
    SELECT *,
           sum(permits) OVER older AS was,
           sum(keeps * live) OVER older AS now_is,
           max(live AND process <> mine) OVER older AS foreign_ahead
    FROM (
        SELECT tickets.*, a.process AS mine,
               asked.id IS NOT NULL AS is_asked,
               min(tickets.permits, coalesce(asked.keeps, tickets.permits)) AS keeps,
               tickets.expires_at > a.now AND asked.leaves IS NOT TRUE AS live
        FROM (SELECT now, process FROM asked LIMIT 1) AS a, tickets LEFT JOIN asked ON asked.id = tickets.id
        WHERE tickets.name IN (
            SELECT names.key FROM names WHERE names.name IN (SELECT key FROM asked)
            UNION ALL
            SELECT mine.name FROM tickets AS mine WHERE mine.id IN (SELECT id FROM asked)
        )
    )
    WINDOW older AS (PARTITION BY name ORDER BY ticket ROWS UNBOUNDED PRECEDING)
)
WHERE NOT live OR now_is - keeps <= capacity OR is_asked;

-- Physically, and before anybody is granted because of it: a renewal that read its clock before this transaction had
-- the file must not find the ticket alive after it was taken for dead.
DELETE FROM tickets WHERE id IN (SELECT id FROM line WHERE NOT live);

-- Another process looks for its grant by itself. If it is dead it does not, and costs two seconds, not its whole ttl.
UPDATE tickets SET expires_at = min(expires_at, (SELECT now + 2000 FROM asked LIMIT 1))
WHERE id IN (
    SELECT id FROM line
    WHERE live AND was > capacity AND now_is <= capacity AND process <> (SELECT process FROM asked LIMIT 1)
);
