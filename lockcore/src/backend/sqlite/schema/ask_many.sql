-- The beginning of a renewal or a release: has the file to itself and notes what is asked.
--
-- ?1 ids, as a JSON array   ?2 1 if they are to leave, else 0   ?3 ids to leave a mark of, as a JSON array
-- ?4 now in ms of the boot clock     ?5 process     ?6 epoch
--
-- Nothing is asked if the epoch is over.

BEGIN IMMEDIATE;

DELETE FROM asked;

INSERT INTO asked (place, id, leaves, marks, now, micros, process)
SELECT json_each.key, json_each.value, ?2, json_each.value IN (SELECT value FROM json_each(?3)), ?4, 0, ?5
FROM json_each(?1), store WHERE epoch = ?6;

