-- Reads the stored capacity of a name.
--
-- ?1 key of the name
-- One row: the epoch of the file, and the capacity and its last change, if there are any.

SELECT store.epoch AS epoch, capacities.capacity AS capacity, capacities.change AS change
FROM store LEFT JOIN capacities ON capacities.name = ?1;
