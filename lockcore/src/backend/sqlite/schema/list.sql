-- Lists names that have a live ticket, in the order of their keys. Reads only.
--
-- ?1 the beginning of the keys   ?2 the last key of the page before, or an empty text   ?3 how many
-- ?4 now in ms of the boot clock   ?5 a text that sorts after all such keys
-- Rows: the key of the name
--
-- The index on the key finds the first name. A name without tickets keeps its row for about a day,
-- and is skipped here.

SELECT name
FROM names
WHERE name >= ?1 AND name > ?2 AND name < ?5
  AND tickets > 0
  AND EXISTS (SELECT 1 FROM tickets WHERE tickets.name = names.key AND expires_at > ?4)
ORDER BY name LIMIT ?3;
