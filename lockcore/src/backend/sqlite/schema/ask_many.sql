-- The beginning of a renewal or a release: locks the file and notes the requests.
--
-- ?1 JSON object: for each id an array of two numbers. For a renewal, these are the permits that
--    the ticket keeps at most, and the new ttl in ms, or null for the ttl that the ticket has.
--    For a release, these are 1 to leave a mark or else 0, and null.
-- ?2 0 for a renewal, 1 for a release   ?3 now in ms of the boot clock   ?4 process   ?5 epoch
--
-- If the epoch is over, no request is noted.

BEGIN IMMEDIATE;

DELETE FROM asked;

INSERT INTO asked (id, keeps, ttl_millis, leaves, marks, now, micros, process)
SELECT key, CASE WHEN NOT ?2 THEN value ->> 0 END, value ->> 1, ?2, ?2 AND value ->> 0, ?3, 0, ?4
FROM json_each(?1), store WHERE epoch = ?5
-- If an id is named twice, it gets the smaller number of permits, the last ttl, and a mark if either asks for one.
ON CONFLICT (id) DO UPDATE
SET keeps = min(keeps, excluded.keeps), ttl_millis = excluded.ttl_millis, marks = max(marks, excluded.marks);

