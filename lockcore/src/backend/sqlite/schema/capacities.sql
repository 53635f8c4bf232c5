-- The stored capacities of names. Made whenever the file is opened without it.
--
-- The holders are not stored: they follow from the order and the capacity. So that a smaller capacity takes nothing
-- back, each row has the number of the youngest ticket that held at the last change: all tickets up to it hold.

CREATE TABLE IF NOT EXISTS capacities (
    name      TEXT    NOT NULL PRIMARY KEY, -- as in `names`
    capacity  INTEGER,                      -- null: it was taken back
    through   INTEGER NOT NULL,             -- tickets up to this number hold
    change    TEXT    NOT NULL,             -- the id of the last change
    changed   INTEGER NOT NULL              -- s of the wall clock; without a capacity the row stays for a day
) WITHOUT ROWID;
