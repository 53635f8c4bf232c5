-- What is in the file. Created once, in one transaction, by whoever opens it first.
--
-- All of it is wire format: a change of it is a new layout version (`PRAGMA user_version`), and versions refuse each
-- other's files. 1 is the first that is released. Foreign keys are left out: no row is ever removed before those that name it.

-- One row. `boot` and `booted_at` tell whether the times in `tickets` are of the clock that runs now; `epoch` changes
-- when they turned out not to be, so that who has not noticed changes nothing any more.
CREATE TABLE store (
    epoch      INTEGER NOT NULL,
    boot       TEXT    NOT NULL, -- the kernel's id of the boot
    booted_at  INTEGER NOT NULL  -- ms of the wall clock at boot, as seen by the first of this boot
);

-- A row per name: locked before a number is drawn, so that no smaller one can appear later. It stays until a day after
-- the wall clock has passed `last`: that is what keeps tokens rising.
CREATE TABLE names (
    key      INTEGER PRIMARY KEY,
    name     TEXT    NOT NULL UNIQUE,   -- namespace:layout version:{name}
    last     INTEGER NOT NULL,          -- the number drawn last; microseconds of the wall clock, or above
    tickets  INTEGER NOT NULL DEFAULT 0 -- how many stand in line, so that nobody has to count them
);

-- A row per ticket, holders and waiters alike. Who holds is not written: it follows from the order.
CREATE TABLE tickets (
    name        INTEGER NOT NULL, -- names.key
    ticket      INTEGER NOT NULL,
    id          TEXT    NOT NULL UNIQUE,
    permits     INTEGER NOT NULL,
    capacity    INTEGER NOT NULL, -- the same on all tickets of a name
    ttl_millis  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL, -- ms of the boot clock
    receiver    INTEGER NOT NULL, -- which client of the process is woken
    process     INTEGER NOT NULL, -- drawn by each process when it opens the file
    owner       TEXT    NOT NULL, -- host/pid/client, for people
    PRIMARY KEY (name, ticket)
) WITHOUT ROWID;

-- The dead of a line are found without a walk along it.
CREATE INDEX ends ON tickets (name, expires_at);

-- Whoever changes `tickets`, a person included, changes these too.
CREATE TRIGGER joined AFTER INSERT ON tickets BEGIN
    UPDATE names SET tickets = tickets + 1, last = max(last, NEW.ticket) WHERE key = NEW.name;
END;
CREATE TRIGGER gone AFTER DELETE ON tickets BEGIN
    UPDATE names SET tickets = tickets - 1 WHERE key = OLD.name;
END;

-- Ids that were released while their enqueue might still have been on its way.
CREATE TABLE marks (
    id          TEXT    NOT NULL PRIMARY KEY,
    expires_at  INTEGER NOT NULL  -- ms of the boot clock
) WITHOUT ROWID;

PRAGMA application_id = 0x6c6f636b; -- "lock"
PRAGMA user_version = 1; -- the layout version
