-- The settings of a handle.

-- With this mode and the write-ahead log, a killed process loses nothing. If the machine goes down, commits since the last
-- checkpoint may be lost. That does no harm: no lease outlives the boot, and the next ticket numbers follow the wall clock,
-- which is beyond the lost numbers. OFF could leave a broken file. FULL would wait for the disk twice for every lock.
PRAGMA synchronous = NORMAL;

PRAGMA temp_store = MEMORY; -- of the tables in `scratch.sql`
PRAGMA foreign_keys = OFF; -- there are none
