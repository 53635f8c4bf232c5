-- Reads a counter.
--
-- ?1 key of the name   ?2 now in s of the boot clock
-- One row: the epoch of the file; now by the file's own clock; and the data of the counter, when it was used last, and
-- how long it stays, if there is one.

SELECT store.epoch AS epoch, ?2 + store.ahead AS now, counters.data AS data, counters.used AS used,
       counters.life AS life
FROM store LEFT JOIN counters ON counters.name = ?1;
