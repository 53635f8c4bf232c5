-- Tables of one connection, in memory: what a verb was asked, and the lines of the names it is about.

CREATE TEMP TABLE asked (
    id          TEXT    NOT NULL PRIMARY KEY,
    key         TEXT,             -- names.name, for an enqueue
    permits     INTEGER,
    capacity    INTEGER,
    ttl_millis  INTEGER,
    wait        INTEGER,
    seen        INTEGER,
    receiver    INTEGER,
    owner       TEXT,
    keeps       INTEGER,          -- permits from now on if it has more, for a renewal
    leaves      INTEGER NOT NULL, -- is to be removed
    marks       INTEGER NOT NULL, -- and is to be refused if it comes later
    swept       INTEGER,          -- names.key, for a sweep
    now         INTEGER NOT NULL, -- ms of the boot clock
    micros      INTEGER NOT NULL, -- of the wall clock
    process     INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TEMP TABLE line (
    name        INTEGER NOT NULL,
    ticket      INTEGER NOT NULL,
    id          TEXT    NOT NULL,
    permits     INTEGER NOT NULL, -- from now on
    capacity    INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    receiver    INTEGER NOT NULL,
    process     INTEGER NOT NULL,
    live        INTEGER NOT NULL, -- neither expired nor leaving
    was         INTEGER NOT NULL, -- permits of this and all older ones, before anybody goes or shrinks
    now_is      INTEGER NOT NULL, -- the same without those that go, and with what the others keep
    foreign_ahead INTEGER NOT NULL -- a live older one is of another process
);
