-- Writes a counter if nobody has written it since it was read.
--
-- ?1 key of the name   ?2 data   ?3 now in s of the file's own clock   ?4 for how many s the row stays
-- ?5 data as it was; null if there was no row
-- Rows: one if it was written
-- One statement, and so one transaction.

INSERT INTO counters (name, data, used, life) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (name) DO UPDATE SET data = excluded.data, used = excluded.used, life = excluded.life
WHERE counters.data IS ?5
RETURNING 1 AS written;
