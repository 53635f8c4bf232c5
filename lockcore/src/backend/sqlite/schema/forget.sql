-- Forgets everything about a name that is not in use. The id of the last change of its capacity
-- stays for a day, so that a repetition of this change does nothing.
--
-- ?1 key of the name   ?2 now in ms of the boot clock
-- One transaction. If all tickets of the name have expired, it is not in use. Nobody waits for these
-- tickets, and their clients learn that they are lost, as they do after a sweep.

BEGIN IMMEDIATE;

DELETE FROM tickets WHERE name = (SELECT key FROM names WHERE name = ?1) AND NOT EXISTS (
    SELECT 1 FROM tickets AS live WHERE live.name = tickets.name AND live.expires_at > ?2
);

UPDATE capacities
SET capacity = NULL, through = 0, changed = coalesce((SELECT ?2 / 1000 + ahead FROM store), changed)
WHERE name = ?1 AND NOT EXISTS (
    SELECT 1 FROM tickets JOIN names ON names.key = tickets.name WHERE names.name = ?1
);

DELETE FROM names WHERE name = ?1 AND NOT EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key);

COMMIT;
