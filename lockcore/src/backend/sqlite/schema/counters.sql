-- The counters of names. The table is created when a file without it is opened. It makes no new
-- layout version. A version of the library that does not know this table has no counters, and does
-- the same with tickets.

CREATE TABLE IF NOT EXISTS counters (
    name  TEXT    NOT NULL PRIMARY KEY, -- as in `names`
    data  TEXT    NOT NULL,             -- value, generation, version, and the changes of the last minute
    used  INTEGER NOT NULL              -- s of the wall clock; the row stays for 36 hours
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS used ON counters (used);
