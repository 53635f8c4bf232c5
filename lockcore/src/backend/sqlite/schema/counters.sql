-- The counters of names. Made whenever the file is opened without it: a version of the library that does not know this
-- table has no counters, and what it does with tickets is the same. So it is no new layout version.

CREATE TABLE IF NOT EXISTS counters (
    name  TEXT    NOT NULL PRIMARY KEY, -- as in `names`
    data  TEXT    NOT NULL,             -- value, generation, version, and the changes of the last minute
    used  INTEGER NOT NULL              -- s of the wall clock; the row stays for 36 hours
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS used ON counters (used);
