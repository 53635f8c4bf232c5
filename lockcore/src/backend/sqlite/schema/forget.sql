-- Forgets everything about a name that is not in use.
--
-- ?1 key of the name
-- One transaction.

BEGIN IMMEDIATE;

DELETE FROM capacities WHERE name = ?1 AND NOT EXISTS (
    SELECT 1 FROM tickets JOIN names ON names.key = tickets.name WHERE names.name = ?1
);

DELETE FROM names WHERE name = ?1 AND NOT EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key);

COMMIT;
