-- Reports the tickets that `line.sql` has removed, and the tickets that hold because of it. Runs
-- after `ask_many.sql`, whose arguments it uses, and `line.sql`.
--
-- Rows, none if the epoch is over: the rows of the view `told`, and for each id a row of kind 0.
-- This row tells whether the ticket was there.
--
-- One transaction, whatever the number of ids.

DELETE FROM marks
WHERE EXISTS (SELECT 1 FROM asked WHERE marks) AND expires_at <= (SELECT now FROM asked LIMIT 1);

-- A mark is kept for a minute. This is far longer than a request waits in its process, and longer
-- than most leases last while their process is stopped.
INSERT INTO marks (id, expires_at) SELECT id, now + 60000 FROM asked WHERE marks
ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;

SELECT 0 AS kind, asked.id AS id, asked.id IN (SELECT id FROM line) AS ticket, 0 AS receiver, NULL AS soonest
FROM asked
UNION ALL
SELECT kind, id, ticket, receiver, soonest FROM told;

COMMIT;
