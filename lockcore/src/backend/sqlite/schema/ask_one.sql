-- The beginning of an enqueue: locks the file, notes the request, and creates the row of the name if it is missing.
--
-- ?1 id        ?2 key of the name   ?3 permits    ?4 capacity   ?5 ttl in ms   ?6 1 to wait, 0 to leave nothing behind
-- ?7 highest ticket number that the client has seen             ?8 receiver    ?9 owner, for people
-- ?10 now in ms of the boot clock   ?11 now in µs of the wall clock            ?12 process      ?13 epoch
-- ?14 1 if the answer may name the ticket ahead
--
-- If the epoch is over, no request is noted.

BEGIN IMMEDIATE;

DELETE FROM asked;

INSERT INTO asked
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, NULL, 0, 0, NULL, NULL, ?14, ?10, ?11, ?12 FROM store WHERE epoch = ?13;

INSERT INTO names (name, last)
SELECT key, 0 FROM asked WHERE id NOT IN (SELECT id FROM marks)
ON CONFLICT (name) DO NOTHING;

