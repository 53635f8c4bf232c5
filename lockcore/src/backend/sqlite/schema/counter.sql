-- Reads a counter.
--
-- ?1 key of the name
-- One row: the epoch of the file, and the data of the counter and when it was used last, if there is one.

SELECT store.epoch AS epoch, counters.data AS data, counters.used AS used
FROM store LEFT JOIN counters ON counters.name = ?1;
