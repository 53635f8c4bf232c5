-- The stored capacities of names. The table is created when a file without it is opened.
--
-- The holders are not stored: they follow from the order and the capacity. But a smaller capacity
-- must take nothing back. So each row has the number of the youngest ticket that held at the last
-- change, and all tickets up to this number hold.

CREATE TABLE IF NOT EXISTS capacities (
    name      TEXT    NOT NULL PRIMARY KEY, -- as in `names`
    capacity  INTEGER,                      -- null: it was taken back
    through   INTEGER NOT NULL,             -- tickets up to this number hold
    change    TEXT    NOT NULL,             -- the id of the last change
    changed   INTEGER NOT NULL              -- s of the file's own clock; without a capacity the row stays for a day
) WITHOUT ROWID;
