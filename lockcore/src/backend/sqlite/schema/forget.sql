-- Forgets everything about a name that is not in use.
--
-- ?1 key of the name
-- One statement, and so one transaction.

DELETE FROM names WHERE name = ?1 AND NOT EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key);
