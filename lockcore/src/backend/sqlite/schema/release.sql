-- Removes tickets (`line.sql` does that) and reports the tickets that hold because of it. Runs after `ask_many.sql`,
-- whose arguments it uses, and `line.sql`.
--
-- Rows, none if the epoch is over: one of kind 0 for each id: whether it was there; and those of the view `told`.
--
-- One transaction, whatever the number of ids.

DELETE FROM marks
WHERE EXISTS (SELECT 1 FROM asked WHERE marks) AND expires_at <= (SELECT now FROM asked LIMIT 1);

-- Kept for a minute: far longer than a request waits in its process, or than the leases of a stopped process count.
INSERT INTO marks (id, expires_at) SELECT id, now + 60000 FROM asked WHERE marks
ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;

SELECT 0 AS kind, asked.id AS id, asked.id IN (SELECT id FROM line) AS ticket, 0 AS receiver, NULL AS soonest
FROM asked
UNION ALL
SELECT kind, id, ticket, receiver, soonest FROM told;

COMMIT;
