-- The counters of names. The table is created when a file without it is opened. It makes no new
-- layout version. A version of the library that does not know this table has no counters, and does
-- the same with tickets.

CREATE TABLE IF NOT EXISTS counters (
    name  TEXT    NOT NULL PRIMARY KEY, -- as in `names`
    data  TEXT    NOT NULL,             -- value, generation, version, and the changes of the last minute
    used  INTEGER NOT NULL,             -- when, in s of the file's own clock: see `store` in tables.sql
    life  INTEGER NOT NULL              -- for how many s the row stays after that
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS ends_of_counters ON counters (used + life);
