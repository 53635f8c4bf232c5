-- Writes a counter if nobody has written it since it was read.
--
-- ?1 key of the name   ?2 data   ?3 now in s of the wall clock   ?4 data as it was; null if there was no row
-- Rows: one if it was written
-- One statement, and so one transaction.

INSERT INTO counters (name, data, used) VALUES (?1, ?2, ?3)
ON CONFLICT (name) DO UPDATE SET data = excluded.data, used = excluded.used WHERE counters.data IS ?4
RETURNING 1 AS written;
