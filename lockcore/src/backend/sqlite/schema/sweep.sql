-- One step of the sweep, which removes old data. A step looks at the next 1,000 names. If all
-- tickets of a name have been dead for a minute, they are removed. If a name has no tickets, and
-- the wall clock passed its last number a day ago, the name is removed.
--
-- Each step also removes dead marks, and counters that were not used for their lifetime. A stored
-- capacity stays. If it was taken back, its row is removed after a day, if no ticket needs it any
-- more. Both are measured by the file's own clock.
--
-- ?1 the last key of the step before   ?2 now in ms of the boot clock
-- ?3 now in µs of the wall clock   ?4 epoch
-- Rows: the last key of this step; null if there are no more names, or if the epoch is over
--
-- This grants nothing: no ticket is removed from a line with a live ticket.

BEGIN IMMEDIATE;

DELETE FROM asked;

INSERT INTO asked (id, swept, leaves, marks, now, micros, process)
SELECT key, key, 0, 0, ?2, ?3, 0 FROM names, store WHERE key > ?1 AND epoch = ?4 ORDER BY key LIMIT 1000;

DELETE FROM tickets
WHERE name IN (
    SELECT swept FROM asked
    WHERE NOT EXISTS (SELECT 1 FROM tickets AS other WHERE other.name = swept AND other.expires_at > now - 60000)
);

DELETE FROM names
WHERE key IN (SELECT swept FROM asked)
  AND last < (SELECT micros - 86400000000 FROM asked LIMIT 1)
  AND NOT EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key);

DELETE FROM marks WHERE expires_at <= (SELECT now FROM asked LIMIT 1);

DELETE FROM counters WHERE used + life < (SELECT ?2 / 1000 + ahead FROM store WHERE epoch = ?4);

DELETE FROM capacities
WHERE capacity IS NULL AND changed < (SELECT ?2 / 1000 + ahead - 86400 FROM store WHERE epoch = ?4)
  AND NOT EXISTS (
      SELECT 1 FROM names JOIN tickets ON tickets.name = names.key
      WHERE names.name = capacities.name AND tickets.ticket <= capacities.through
  );

SELECT max(swept) AS last FROM asked;

COMMIT;
