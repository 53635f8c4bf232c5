-- The contents of the file, except for `counters.sql` and `capacities.sql`. Created once, in one
-- transaction, by the first process that opens the file.
--
-- All of this is wire format: a change makes a new layout version (`PRAGMA user_version`), and each
-- version refuses files of the others. The first released version is 1. There are no foreign keys,
-- because no row is removed before the rows that refer to it.

-- One row. `boot` and `booted_at` tell whether the times in `tickets` belong to the clock that runs
-- now. If they belong to an earlier boot, `epoch` changes. So a process that has not noticed the
-- change cannot write anything any more.
--
-- The file's own clock tells how long ago a counter or a stored capacity was used. It is the boot
-- clock plus `ahead`. When a boot begins, it continues from the last use that the file knows. So it
-- stands still while the machine is off, and nobody can set it: a wall clock that is wrong in one
-- process removes nothing.
CREATE TABLE store (
    epoch      INTEGER NOT NULL,
    boot       TEXT    NOT NULL, -- the kernel's ids of the boot, as each container saw it, with spaces between
    booted_at  INTEGER NOT NULL, -- ms of the wall clock at boot, as its first process saw it
    ahead      INTEGER NOT NULL  -- s by which the file's own clock is ahead of the boot clock
);

-- One row per name. The file is locked before a number is drawn, so that no smaller number can
-- appear later. The row stays until a day after the wall clock has passed `last`, because `last`
-- keeps the tokens rising.
CREATE TABLE names (
    key      INTEGER PRIMARY KEY,
    name     TEXT    NOT NULL UNIQUE,   -- namespace:layout version:{name}
    last     INTEGER NOT NULL,          -- the number drawn last; microseconds of the wall clock, or above
    tickets  INTEGER NOT NULL DEFAULT 0 -- how many there are, so that no request has to count them
);

-- One row per ticket, for holders and waiters alike. Which tickets hold is not stored: it follows from the order.
CREATE TABLE tickets (
    name        INTEGER NOT NULL, -- names.key
    ticket      INTEGER NOT NULL,
    id          TEXT    NOT NULL UNIQUE,
    permits     INTEGER NOT NULL,
    capacity    INTEGER NOT NULL, -- the same on all tickets of a name without a stored capacity
    ttl_millis  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL, -- ms of the boot clock
    receiver    INTEGER NOT NULL, -- which client of the process is woken
    process     INTEGER NOT NULL, -- drawn by each process when it opens the file
    owner       TEXT    NOT NULL, -- host/pid/client, for people
    -- 1 if the ticket right ahead was named to the client. Then the client may believe that the
    -- ticket holds, and nobody shortens its lease.
    named       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (name, ticket)
) WITHOUT ROWID;

-- Finds the expired tickets of a line without reading the whole line.
CREATE INDEX ends ON tickets (name, expires_at);

-- These triggers run on every change of `tickets`, also on one by a person.
CREATE TRIGGER joined AFTER INSERT ON tickets BEGIN
    UPDATE names SET tickets = tickets + 1, last = max(last, NEW.ticket) WHERE key = NEW.name;
END;
CREATE TRIGGER gone AFTER DELETE ON tickets BEGIN
    UPDATE names SET tickets = tickets - 1 WHERE key = OLD.name;
END;

-- Ids that were released while their enqueue could still arrive.
CREATE TABLE marks (
    id          TEXT    NOT NULL PRIMARY KEY,
    expires_at  INTEGER NOT NULL  -- ms of the boot clock
) WITHOUT ROWID;

PRAGMA application_id = 0x6c6f636b; -- "lock"
PRAGMA user_version = 1; -- the layout version
