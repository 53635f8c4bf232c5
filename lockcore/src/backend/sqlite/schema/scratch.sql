-- Tables of one connection, in memory: the requests of an operation, and the lines of their names.

CREATE TEMP TABLE asked (
    id          TEXT    NOT NULL PRIMARY KEY,
    key         TEXT,             -- names.name, for an enqueue and a resize
    permits     INTEGER,
    capacity    INTEGER,
    ttl_millis  INTEGER,          -- null leaves it as it is
    wait        INTEGER,
    seen        INTEGER,
    receiver    INTEGER,
    owner       TEXT,
    keeps       INTEGER,          -- for a renewal: the ticket keeps at most this many permits
    leaves      INTEGER NOT NULL, -- for a release: the ticket is to be removed
    marks       INTEGER NOT NULL, -- for a release: leave a mark, so that a late enqueue is refused
    swept       INTEGER,          -- names.key, for a sweep
    resizes     INTEGER,          -- stores `capacity`
    names_ahead INTEGER,          -- for an enqueue: the answer may name the ticket ahead
    now         INTEGER NOT NULL, -- ms of the boot clock
    micros      INTEGER NOT NULL, -- of the wall clock
    process     INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TEMP TABLE line (
    name        INTEGER NOT NULL,
    ticket      INTEGER NOT NULL,
    id          TEXT    NOT NULL,
    permits     INTEGER NOT NULL, -- after this request
    capacity    INTEGER NOT NULL, -- of the ticket
    expires_at  INTEGER NOT NULL,
    receiver    INTEGER NOT NULL,
    process     INTEGER NOT NULL,
    live        INTEGER NOT NULL, -- not expired, and not to be removed
    -- These are null behind the first waiter.
    older_was   INTEGER,          -- permits of all older tickets before this request
    was         INTEGER,          -- `older_was` plus its own permits
    now_is      INTEGER,          -- the same as `was`, but after this request
    limit_was   INTEGER,          -- the ticket held if `was` was at most this
    limit_is    INTEGER,          -- it holds if `now_is` is at most this
    PRIMARY KEY (name, ticket)
) WITHOUT ROWID;

-- The tickets of this process that must be notified because the answer to their own request does not tell them. Kind 1:
-- tickets that hold newly. Kind 2: first waiters that do not know when the first of the holders expires, and that time.
-- They are newly the first, or a holder has asked for a shorter lease.
CREATE TEMP VIEW told AS
SELECT 1 AS kind, id, ticket, receiver, NULL AS soonest
FROM line
WHERE live AND was > limit_was AND now_is <= limit_is
  AND process = (SELECT process FROM asked LIMIT 1) AND id NOT IN (SELECT id FROM asked)
UNION ALL
SELECT 2, id, ticket, receiver, (
    SELECT min(t.expires_at) FROM line AS holder CROSS JOIN tickets AS t ON t.id = holder.id
    WHERE holder.name = line.name AND holder.live AND holder.now_is <= holder.limit_is
)
FROM line
WHERE live AND now_is > limit_is
  AND (
      older_was > limit_was
      -- `line` has the old ends, and `asked` the new ones.
      OR EXISTS (
          SELECT 1 FROM line AS holder JOIN asked ON asked.id = holder.id
          WHERE holder.name = line.name AND holder.live AND holder.now_is <= holder.limit_is
            AND asked.now + asked.ttl_millis < holder.expires_at
      )
  )
  AND process = (SELECT process FROM asked LIMIT 1) AND id NOT IN (SELECT id FROM asked);
