-- Gives a ticket that holds to another client. Finds the ticket by its number, which stays. If the ticket has the new id
-- already, an earlier attempt has succeeded, and this renews it.
--
-- ?1 key of the name   ?2 id so far   ?3 number   ?4 permits   ?5 capacity   ?6 new id   ?7 ttl in ms   ?8 receiver
-- ?9 process           ?10 owner, for people      ?11 1 to leave a mark for the id so far, else 0
-- ?12 now in ms of the boot clock                 ?13 epoch
-- Rows: the number of the ticket, if it was given. No row, and nothing has changed, if
-- - the ticket is not there, has expired or waits;
-- - it has other permits or another capacity;
-- - the new id was released before; or
-- - the epoch is over.
--
-- One transaction. An ask behind the owner (`ask_back.sql`) stays. This grants no other ticket.

BEGIN IMMEDIATE;

UPDATE tickets SET id = ?6, ttl_millis = ?7, expires_at = ?12 + ?7, receiver = ?8, process = ?9,
    owner = ?10 || CASE WHEN instr(owner, char(10)) THEN substr(owner, instr(owner, char(10))) ELSE '' END
WHERE name = (SELECT key FROM names WHERE name = ?1) AND ticket = ?3 AND id IN (?2, ?6)
  AND expires_at > ?12 AND permits = ?4 AND capacity = ?5
  AND ?6 NOT IN (SELECT id FROM marks)
  AND EXISTS (SELECT 1 FROM store WHERE epoch = ?13)
  -- The ticket holds: see `capacities.sql`.
  AND (
      ticket <= coalesce((SELECT through FROM capacities WHERE capacities.name = ?1), 0)
      OR coalesce((SELECT stored.capacity FROM capacities AS stored WHERE stored.name = ?1), capacity) >= (
          SELECT sum(older.permits) FROM tickets AS older
          WHERE older.name = tickets.name AND older.ticket <= tickets.ticket AND older.expires_at > ?12
      )
  )
RETURNING ticket;

-- The mark is kept for a minute: see `release.sql`.
INSERT INTO marks (id, expires_at)
SELECT ?2, ?12 + 60000 FROM tickets WHERE id = ?6 AND ?11
ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;

COMMIT;
