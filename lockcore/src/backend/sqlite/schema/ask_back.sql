-- Asks the client of a ticket to give it up: writes the ask behind the owner, after a line break.
--
-- ?1 key of the name   ?2 id   ?3 the ask, without line breaks   ?4 now in ms of the boot clock   ?5 process   ?6 epoch
-- Rows: if the ticket is there and lives, its receiver, and whether it is of this process.
--
-- One statement, and so one transaction. A version of the library that does not know about asks takes the ask for a part
-- of the owner.

UPDATE tickets SET owner = substr(owner, 1, instr(owner || char(10), char(10)) - 1) || char(10) || ?3
WHERE id = ?2 AND expires_at > ?4 AND name = (SELECT key FROM names WHERE name = ?1)
  AND EXISTS (SELECT 1 FROM store WHERE epoch = ?6)
RETURNING receiver, process = ?5 AS ours;
