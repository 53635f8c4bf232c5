-- The schema of lockcore for PostgreSQL 13 and later. A client that finds it missing, or finds functions of an earlier version,
-- runs this file, if it has the right. Otherwise a person runs it, in the database of the URL, as the owner of the schema:
-- psql --set=ON_ERROR_STOP=1 --single-transaction --file=lockcore1.sql
--
-- The tables, and the names, the parameters and the answers of the functions in the second list below are wire format: a change
-- makes another schema, with another number. Clients of several versions use this schema at the same time, with the functions
-- of the latest one. So a later version of this file may change what is inside of functions, and add functions. A call of a
-- client may be under way meanwhile, and find some functions replaced. So a function that gets another meaning gets another
-- name.
--
-- Only the functions in the second list are called by clients. A client needs USAGE on the schema and EXECUTE on these
-- functions, and no right on a table.
--
-- Times are in microseconds. They are of the wall clock of the server, and are read when the name is locked.

SELECT pg_advisory_xact_lock(1818583907, 0); -- "lock"; two clients may run this at once
SET search_path = lockcore1, pg_temp;
DO $do$
BEGIN
    IF to_regnamespace('lockcore1') IS NOT NULL THEN
        IF lockcore1.version() > 4 THEN
            RAISE EXCEPTION 'the functions of lockcore are those of a later version, and stay' USING ERRCODE = 'LC002';
        END IF;
        RETURN;
    END IF;
    CREATE SCHEMA lockcore1;

    -- One row for each name that a ticket has left lately, or that has a stored capacity. The row stays for a day after `last`,
    -- because `last` keeps the numbers rising.
    CREATE TABLE names (
        name      text   COLLATE "C" PRIMARY KEY, -- namespace:layout version:{name}
        last      bigint NOT NULL DEFAULT 0,      -- no ticket that has gone had a greater number
        first     bigint NOT NULL DEFAULT 0,      -- no ticket that is there has a smaller number: walks begin here
        capacity  int,                            -- the stored capacity
        change    uuid,                           -- the id of its last change
        changed   bigint                          -- when that was
    ) WITH (fillfactor = 70);

    -- One row for each ticket, for holders and waiters alike. No index has a column that a renewal or a grant changes.
    CREATE TABLE tickets (
        name        text    COLLATE "C" NOT NULL,
        ticket      bigint  NOT NULL,
        id          uuid    NOT NULL UNIQUE,
        permits     int     NOT NULL,
        capacity    int     NOT NULL,  -- as the request stated it
        ttl         bigint  NOT NULL,
        expires_at  bigint  NOT NULL,
        granted     boolean NOT NULL,  -- set once, and never unset: a smaller capacity takes nothing back
        place       bigint  NOT NULL,  -- one more than that of the ticket before, so the length of a line need not be counted
        receiver    bigint  NOT NULL,  -- the channel of the client that is woken is lockcore1.<receiver>
        owner       text    NOT NULL,  -- host/pid/client, for people; an ask-back stands behind it, after a line break
        PRIMARY KEY (name, ticket)
    ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

    -- The ids that were released while their enqueue could still arrive.
    CREATE TABLE marks (
        id          uuid   PRIMARY KEY,
        name        text   COLLATE "C" NOT NULL,
        expires_at  bigint NOT NULL
    );

    -- Counters, and values of locks. The text of a value may have characters that a text of PostgreSQL cannot have.
    CREATE TABLE counters (
        name  text   COLLATE "C" PRIMARY KEY,
        data  bytea  NOT NULL, -- a text: value, generation, version, the changes of the last minute, the text of a value
        used  bigint NOT NULL, -- when, in s
        life  bigint NOT NULL  -- for how many s the row stays after that
    );

    -- A message to the client of a ticket: it is granted, or its client looks again after this time.
    CREATE TYPE news AS (receiver bigint, id uuid, ticket bigint, again bigint);

    -- What a walk along the line of a name has found.
    CREATE TYPE walk AS (
        held         bigint, -- permits
        soonest      bigint, -- when the first of the holders expires
        first        bigint, -- the first ticket that waits, its id and its receiver
        first_id     uuid,
        first_heard  bigint,
        capacity     int,    -- of the oldest ticket
        place        bigint, -- of the oldest ticket
        granted      news[]  -- the tickets that hold since this walk
    );
END $do$;

-- ---- inside

CREATE OR REPLACE FUNCTION now_micros() RETURNS bigint LANGUAGE plpgsql AS $f$
BEGIN
    RETURN (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
END $f$;

-- The beginning of every verb: locks the names before anything is read. Each statement behind it must see what was
-- committed by then, which is true in READ COMMITTED only.
--
-- A verb holds the lock to the end of its transaction. So it must not wait for the disk: it is committed asynchronously, and
-- the client waits for the disk elsewhere (`flush`) before the verb counts. Only a client behind a pooler calls `flush` in
-- the same transaction.
CREATE OR REPLACE FUNCTION take(n text) RETURNS bigint LANGUAGE plpgsql AS $f$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'lockcore needs READ COMMITTED: set default_transaction_isolation for its user' USING ERRCODE = '22023';
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock(1818583907, hashtext(n));
    RETURN now_micros();
END $f$;

-- The order is that of the hashes, not of the names: two names may have the same hash.
CREATE OR REPLACE FUNCTION take_all(names text[]) RETURNS bigint LANGUAGE plpgsql AS $f$
DECLARE n text; h int;
BEGIN
    n := names[1];
    IF cardinality(names) = 1 THEN RETURN take(n); END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'lockcore needs READ COMMITTED: set default_transaction_isolation for its user' USING ERRCODE = '22023';
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR h IN SELECT DISTINCT hashtext(x) FROM unnest(names) AS x ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(1818583907, h);
    END LOOP;
    RETURN now_micros();
END $f$;

-- The youngest ticket of a name has gone: numbers go on behind it.
CREATE OR REPLACE FUNCTION went(n text, number bigint) RETURNS void LANGUAGE plpgsql AS $f$
BEGIN -- an UPDATE that finds the row costs less than an INSERT that conflicts, and the name is locked
    UPDATE names x SET last = greatest(x.last, number) WHERE x.name = n;
    IF NOT FOUND THEN INSERT INTO names (name, last) VALUES (n, number); END IF;
END $f$;

-- Removes a ticket. Returns false if a transaction has called `hold` for it and has not ended: nobody else locks the row,
-- because the name is locked here. Without waiting for that transaction, the ticket stays.
CREATE OR REPLACE FUNCTION remove(n text, number bigint) RETURNS boolean LANGUAGE plpgsql AS $f$
BEGIN
    DELETE FROM tickets t
    WHERE t.ctid = (SELECT f.ctid FROM tickets f WHERE f.name = n AND f.ticket = number FOR UPDATE SKIP LOCKED);
    RETURN FOUND;
END $f$;

-- Walks along the line of a name: removes the dead in front of the first live waiter, and grants what fits. The grants are
-- in the answer, and the caller sends the messages.
CREATE OR REPLACE FUNCTION settle(n text, now bigint) RETURNS walk LANGUAGE plpgsql AS $f$
DECLARE
    l walk; r record; stored int; at bigint; gone bigint := -1; there bigint := -1;
BEGIN
    l.held := 0; l.granted := '{}';
    SELECT x.capacity, x.first INTO stored, at FROM names x WHERE x.name = n;
    at := coalesce(at, 0) - 1;
    LOOP
        -- One step of the walk. Without a limit, a loop over a query may read and sort the whole line.
        SELECT t.ticket, t.id, t.permits, t.capacity, t.expires_at, t.granted, t.receiver, t.place INTO r
        FROM tickets t WHERE t.name = n AND t.ticket > at ORDER BY t.ticket LIMIT 1;
        EXIT WHEN NOT FOUND;
        at := r.ticket;
        IF r.expires_at <= now THEN
            IF remove(n, at) THEN
                gone := at;
                CONTINUE;
            END IF;
            -- It is in the way until the transaction that holds it ends. Nobody sends a message then, so waiters look again.
            r.granted := true; r.expires_at := now + 50000;
        END IF;
        IF there < 0 THEN
            l.capacity := r.capacity; l.place := r.place;
            -- While another transaction has an old snapshot, removed rows stay in the table. No walk begins among them.
            IF r.place % 100 = 0 AND r.place > 0 THEN
                UPDATE names x SET first = at WHERE x.name = n;
                IF NOT FOUND THEN INSERT INTO names (name, first) VALUES (n, at); END IF;
            END IF;
        END IF;
        there := at;
        IF NOT r.granted THEN
            IF l.held + r.permits > coalesce(stored, r.capacity) THEN
                l.first := at; l.first_id := r.id; l.first_heard := r.receiver;
                EXIT;
            END IF;
            UPDATE tickets t SET granted = true WHERE t.name = n AND t.ticket = at;
            l.granted := l.granted || ROW(r.receiver, r.id, at, NULL)::news;
        END IF;
        l.held := l.held + r.permits;
        l.soonest := least(l.soonest, r.expires_at);
    END LOOP;
    IF gone > there THEN PERFORM went(n, gone); END IF;
    RETURN l;
END $f$;

-- Sends messages: "<id> <ticket>" for a grant, and "<id> again <ms>" to look again. At most a hundred of them are in one
-- notification, whose text may have 8,000 bytes. The request answers for the tickets in `answered`.
--
-- A session whose messages the server did not take sets `lockcore1.quiet`. Then it sends none.
CREATE OR REPLACE FUNCTION tell(messages news[], answered uuid[]) RETURNS void LANGUAGE plpgsql AS $f$
BEGIN
    IF messages = '{}' OR current_setting('lockcore1.quiet', true) = 'on' THEN RETURN; END IF;
    PERFORM pg_notify('lockcore1.' || m.receiver, string_agg(
        replace(m.id::text, '-', '') || CASE WHEN m.again IS NULL THEN ' ' || m.ticket ELSE ' again ' || m.again / 1000 END, ','))
    FROM (
        SELECT w.*, (row_number() OVER (PARTITION BY w.receiver) - 1) / 100 AS part FROM unnest(messages) AS w
        WHERE w.id <> ALL (answered)
    ) AS m
    GROUP BY m.receiver, m.part;
END $f$;

-- The message to the first waiter of a line that nobody wakes it when the lease of a holder ends.
CREATE OR REPLACE FUNCTION again(l walk, now bigint) RETURNS news LANGUAGE plpgsql AS $f$
BEGIN
    RETURN ROW(l.first_heard, l.first_id, l.first, greatest(l.soonest - now, 0))::news;
END $f$;

-- ---- what clients call

-- The version of this text. It changes with every change of a function. It is also at the beginning of this file.
CREATE OR REPLACE FUNCTION version() RETURNS int LANGUAGE plpgsql AS $f$ BEGIN RETURN 4; END $f$;

-- This transaction is committed when it and everything that was committed before are on the disk, or at the standbys, as
-- `durability` says: a value of synchronous_commit. The message is the smallest transaction that writes to the log.
--
-- If somebody ends the wait for a standby, the server answers as if it had come to an end, and warns. So no setting of the
-- user may hide this warning.
CREATE OR REPLACE FUNCTION flush(durability text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
BEGIN
    PERFORM set_config('synchronous_commit', durability, true);
    PERFORM set_config('client_min_messages', 'warning', true);
    PERFORM pg_logical_emit_message(true, 'lockcore', '');
END $f$;

-- Takes a ticket. If an earlier attempt with the same id has left one, finds that ticket and renews it.
--
-- p permits   c capacity   lives ttl   waits: whether to stand in line   seen: the highest number that the client has seen
-- me receiver   own owner   hears: whether the connection listens already; if not, it begins when the ticket waits
-- outcome 0 granted, 1 waiting, 2 busy, 3 another capacity is in use, 4 gone, 5 numbers are exhausted
--
-- The connection listens from the commit on, and the name is locked until then. So no later grant is missed.
CREATE OR REPLACE FUNCTION enqueue(i uuid, n text, p int, c int, lives bigint, waits boolean, seen bigint, me bigint, own text, hears boolean,
    OUT outcome int, OUT ticket bigint, OUT soonest_in bigint, OUT in_use int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint := take(n); l walk; mine record; nm record; youngest bigint; behind bigint; holds boolean;
BEGIN
    SELECT t.ticket, t.expires_at INTO mine FROM tickets t WHERE t.id = i AND t.name = n;
    IF FOUND THEN
        IF mine.expires_at <= now THEN -- an earlier attempt took it, and it has died since
            IF remove(n, mine.ticket) THEN PERFORM went(n, mine.ticket); END IF;
            l := settle(n, now);
            outcome := 4;
        ELSE
            UPDATE tickets t SET expires_at = now + lives, ttl = lives, receiver = me WHERE t.id = i;
            l := settle(n, now);
            ticket := mine.ticket;
            SELECT CASE WHEN t.granted THEN 0 ELSE 1 END INTO outcome FROM tickets t WHERE t.id = i;
            IF l.first = mine.ticket THEN soonest_in := l.soonest - now; END IF;
            IF outcome = 1 AND NOT hears THEN EXECUTE format('LISTEN %I', 'lockcore1.' || me); END IF;
        END IF;
        PERFORM tell(l.granted, ARRAY[i]);
        RETURN;
    END IF;
    IF EXISTS (SELECT 1 FROM marks m WHERE m.id = i AND m.expires_at > now) THEN outcome := 4; RETURN; END IF;

    SELECT t.ticket, t.place INTO youngest, behind FROM tickets t WHERE t.name = n ORDER BY t.ticket DESC LIMIT 1;
    IF FOUND THEN
        l := settle(n, now);
        PERFORM tell(l.granted, '{}');
        IF l.capacity IS NULL THEN youngest := NULL; behind := NULL; END IF; -- all were dead
    ELSE
        l.held := 0;
    END IF;
    SELECT x.last, x.capacity INTO nm FROM names x WHERE x.name = n;
    -- While a capacity is stored, any stated one will do, but a mutex is refused.
    in_use := CASE WHEN nm.capacity IS NULL THEN nullif(l.capacity, c) WHEN c = 1073741824 THEN nm.capacity END;
    IF in_use IS NOT NULL THEN outcome := 3; RETURN; END IF;
    holds := l.first IS NULL AND l.held + p <= coalesce(nm.capacity, c);
    IF NOT holds AND (NOT waits OR behind - l.place >= 9999
                      AND (SELECT count(*) FROM (SELECT 1 FROM tickets t WHERE t.name = n LIMIT 10000) q) >= 10000) THEN
        outcome := 2; soonest_in := l.soonest - now; RETURN;
    END IF;

    -- Numbers only rise: above the last one and the one in front, and not below the clock. A number that the client has seen
    -- counts if it is at most a day ahead. Otherwise one wrong clock would spoil all numbers.
    ticket := greatest(now, nm.last + 1, youngest + 1, CASE WHEN seen <= now + 86400000000 THEN seen + 1 END);
    IF ticket > 9007199254740991 THEN ticket := NULL; outcome := 5; RETURN; END IF;
    INSERT INTO tickets VALUES (n, ticket, i, p, c, lives, now + lives, holds, coalesce(behind + 1, 0), me, own);
    IF holds THEN outcome := 0; RETURN; END IF;
    outcome := 1;
    IF l.first IS NULL THEN soonest_in := l.soonest - now; END IF;
    IF NOT hears THEN EXECUTE format('LISTEN %I', 'lockcore1.' || me); END IF;
END $f$;

-- Extends tickets to their new ttl, counted from now, and makes those smaller that are to keep fewer permits. If a lease ends
-- earlier than before, tells the first waiter when to look again.
--
-- names: those of the tickets, each once   keeps: how many permits each keeps at most   lives ttl
-- One row for each id, in order. Without a ticket it is lost. `owner` only if somebody asks for the ticket.
CREATE OR REPLACE FUNCTION renew(names text[], ids uuid[], keeps int[], lives bigint[])
RETURNS TABLE (ticket bigint, holds boolean, ttl bigint, soonest_in bigint, owner text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
#variable_conflict use_column
DECLARE
    now bigint := take_all(names); l walk; n text; messages news[] := '{}';
    lines text[] := '{}'; firsts bigint[] := '{}'; soons bigint[] := '{}'; shorter text[];
BEGIN
    WITH renewed AS (
        UPDATE tickets t SET expires_at = now + a.lives, ttl = a.lives, permits = least(t.permits, a.keeps)
        FROM unnest(ids, keeps, lives) AS a(id, keeps, lives), tickets was
        WHERE was.id = a.id AND t.id = a.id AND t.expires_at > now
        RETURNING t.name, was.expires_at > t.expires_at AS ends_earlier
    )
    SELECT coalesce(array_agg(DISTINCT r.name), '{}') INTO shorter FROM renewed r WHERE r.ends_earlier;
    -- A line is walked along if one of the tickets is in it, dead or alive, and somebody waits there. So the renewal of
    -- holders that nobody waits for is one UPDATE.
    FOR n IN SELECT DISTINCT t.name FROM tickets t
             WHERE t.id = ANY (ids) AND EXISTS (SELECT 1 FROM tickets w WHERE w.name = t.name AND NOT w.granted) ORDER BY 1 LOOP
        l := settle(n, now);
        messages := messages || l.granted;
        IF l.first IS NOT NULL THEN
            IF n = ANY (shorter) THEN messages := messages || again(l, now); END IF;
            lines := lines || n; firsts := firsts || l.first; soons := soons || l.soonest;
        END IF;
    END LOOP;
    PERFORM tell(messages, ids);
    RETURN QUERY
    SELECT t.ticket, t.granted, t.ttl,
           (SELECT f.soonest - now FROM unnest(lines, firsts, soons) AS f(line, first, soonest)
            WHERE f.line = t.name AND f.first = t.ticket),
           CASE WHEN position(E'\n' IN t.owner) > 0 THEN t.owner END
    FROM unnest(ids) WITH ORDINALITY AS a(id, at) LEFT JOIN tickets t ON t.id = a.id AND t.expires_at > now
    ORDER BY a.at;
END $f$;

-- Removes tickets, and wakes those that are granted by this. If the first waiter has gone, tells the next one when to look
-- again, because nobody wakes it when the lease of a holder ends. A ticket that a transaction holds (`hold`) expires instead,
-- and is in the way until that transaction ends.
--
-- names, ids, marked: of each ticket; marked leaves a mark for a late enqueue   One row for each id, in order.
CREATE OR REPLACE FUNCTION release(names text[], ids uuid[], marked boolean[]) RETURNS TABLE (was_there boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint; l walk; r record; messages news[] := '{}'; gone uuid[] := '{}'; free uuid[]; kept boolean := false;
BEGIN
    now := take_all(names);
    IF cardinality(ids) = 1 AND NOT marked[1] THEN -- the usual case, in few statements
        DELETE FROM tickets t WHERE t.ctid = (SELECT f.ctid FROM tickets f WHERE f.id = ids[1] FOR UPDATE SKIP LOCKED)
        RETURNING t.name, t.ticket, t.granted INTO r;
        IF NOT FOUND THEN
            UPDATE tickets t SET expires_at = 0 WHERE t.id = ids[1] RETURNING t.name, t.ticket, t.granted INTO r;
            kept := FOUND;
        END IF;
        was_there := r.ticket IS NOT NULL;
        RETURN NEXT;
        IF NOT was_there THEN RETURN; END IF;
        PERFORM 1 FROM tickets t WHERE t.name = r.name AND t.ticket > r.ticket LIMIT 1;
        IF NOT FOUND THEN
            PERFORM went(r.name, r.ticket);
            IF r.granted THEN RETURN; END IF; -- nobody stands behind it, and nobody in front of a holder waits
        END IF;
        l := settle(r.name, now);
        messages := l.granted;
        IF (kept OR NOT r.granted) AND r.ticket < l.first THEN
            messages := messages || again(l, now);
        END IF;
        PERFORM tell(messages, '{}');
        RETURN;
    END IF;

    INSERT INTO marks AS m SELECT DISTINCT ON (a.id) a.id, a.name, now + 60000000
    FROM unnest(names, ids, marked) AS a(name, id, marked) WHERE a.marked
    ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;
    free := ARRAY(SELECT f.id FROM tickets f WHERE f.id = ANY (ids) FOR UPDATE SKIP LOCKED);
    FOR r IN WITH g AS (DELETE FROM tickets t WHERE t.id = ANY (free) RETURNING t.name, t.ticket, t.id, t.granted),
                  k AS (UPDATE tickets t SET expires_at = 0 WHERE t.id = ANY (ids) AND t.id <> ALL (free)
                        RETURNING t.name, t.ticket, t.id, false)
             SELECT a.name, max(a.ticket) AS youngest, min(a.ticket) FILTER (WHERE NOT a.granted) AS waiter,
                    array_agg(a.id) AS ids
             FROM (SELECT * FROM g UNION ALL SELECT * FROM k) AS a GROUP BY a.name ORDER BY a.name LOOP
        gone := gone || r.ids;
        IF NOT EXISTS (SELECT 1 FROM tickets t WHERE t.name = r.name AND t.ticket > r.youngest) THEN
            PERFORM went(r.name, r.youngest);
        END IF;
        l := settle(r.name, now);
        messages := messages || l.granted;
        IF r.waiter < l.first THEN
            messages := messages || again(l, now);
        END IF;
    END LOOP;
    PERFORM tell(messages, '{}');
    RETURN QUERY SELECT a.id = ANY (gone) FROM unnest(ids) WITH ORDINALITY AS a(id, at) ORDER BY a.at;
END $f$;

-- Gives a ticket that holds to another client. It keeps its number, its permits and its place, and an ask-back behind its
-- owner. `ticket` is null, and nothing has changed, if there is no such ticket, if it waits, or if the new id was released.
--
-- was, number: the id so far and the number   i the new id   marked: leave a mark for the id so far
CREATE OR REPLACE FUNCTION adopt(n text, was uuid, number bigint, p int, c int, i uuid, lives bigint, me bigint, own text, marked boolean,
    OUT ticket bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint := take(n); l walk;
BEGIN
    l := settle(n, now);
    PERFORM tell(l.granted, '{}');
    -- A transaction that holds the ticket (`hold`) locks the id. The verb does not wait for it, and fails.
    PERFORM 1 FROM tickets t WHERE t.name = n AND t.ticket = number FOR UPDATE NOWAIT;
    UPDATE tickets t SET id = i, ttl = lives, expires_at = now + lives, receiver = me,
        owner = own || CASE WHEN position(E'\n' IN t.owner) > 0 THEN substr(t.owner, position(E'\n' IN t.owner)) ELSE '' END
    WHERE t.name = n AND t.ticket = number AND t.id IN (was, i) AND t.granted AND t.expires_at > now
      AND t.permits = p AND t.capacity = c AND NOT EXISTS (SELECT 1 FROM marks m WHERE m.id = i AND m.expires_at > now)
    RETURNING t.ticket INTO ticket;
    IF ticket IS NOT NULL AND marked THEN
        INSERT INTO marks AS m VALUES (was, n, now + 60000000) ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;
    END IF;
END $f$;

-- Asks the client of a ticket to give it up: writes the ask-back behind the owner, and tells the client to look.
CREATE OR REPLACE FUNCTION ask_back(n text, i uuid, ask text, OUT was_there boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint := take(n); r record;
BEGIN
    UPDATE tickets t SET owner = split_part(t.owner, E'\n', 1) || E'\n' || ask
    WHERE t.id = i AND t.name = n AND t.expires_at > now RETURNING t.receiver, t.ticket INTO r;
    was_there := r.ticket IS NOT NULL;
    IF was_there THEN PERFORM tell(ARRAY[ROW(r.receiver, i, r.ticket, 0)::news], '{}'); END IF;
END $f$;

-- The live tickets of a name, oldest first. A ticket that holds because one in front has died is shown as a holder, although
-- nobody has noticed that yet.
CREATE OR REPLACE FUNCTION inspect(n text)
RETURNS TABLE (ticket bigint, granted boolean, permits int, capacity int, remaining bigint, age bigint, owner text, id uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
#variable_conflict use_column
DECLARE now bigint := now_micros();
BEGIN
    RETURN QUERY
    SELECT t.ticket,
           t.granted OR sum(t.permits) OVER (ORDER BY t.ticket ROWS UNBOUNDED PRECEDING) <= coalesce(x.capacity, t.capacity),
           t.permits, coalesce(x.capacity, t.capacity), t.expires_at - now, greatest(now - t.ticket, 0), t.owner, t.id
    FROM tickets t LEFT JOIN names x ON x.name = t.name
    WHERE t.name = n AND t.expires_at > now ORDER BY t.ticket;
END $f$;

-- Names that have a live ticket, in order, from `begins` to before `ends`, and behind `after`. One look into the index for
-- each name, however many tickets it has.
CREATE OR REPLACE FUNCTION list(begins text, after text, ends text, many int) RETURNS TABLE (name text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
#variable_conflict use_column
DECLARE now bigint := now_micros();
BEGIN
    RETURN QUERY
    WITH RECURSIVE used AS (
        SELECT (SELECT min(t.name) FROM tickets t WHERE t.name >= begins AND t.name > after AND t.name < ends) AS name
        UNION ALL
        SELECT (SELECT min(t.name) FROM tickets t WHERE t.name > u.name AND t.name < ends) FROM used u WHERE u.name IS NOT NULL
    )
    SELECT u.name FROM used u
    WHERE u.name IS NOT NULL AND EXISTS (SELECT 1 FROM tickets t WHERE t.name = u.name AND t.expires_at > now)
    LIMIT many;
END $f$;

-- The names of `list`, each with a summary of its line: how many tickets hold and wait, the owner and the age of the oldest that
-- holds, and the greatest age of those that wait. All tickets of a line are read for this, so a line with more than about 100
-- is not summed up. The other lines are summed up until about 4,000 tickets are read, the shortest first. The remaining names
-- have zeros and nulls. So does a name whose last ticket has just gone, because each line is read after the names.
--
-- `inspect` gets a null in place of the name of a line that is not to be read. A condition of the join would come too late: it is
-- checked when the line has been read.
CREATE OR REPLACE FUNCTION overview(begins text, after text, ends text, many int)
RETURNS TABLE (name text, holders bigint, waiters bigint, owner text, since bigint, longest_wait bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH lengths AS (
        SELECT l.name, 1 + (SELECT t.place FROM tickets t WHERE t.name = l.name ORDER BY t.ticket DESC LIMIT 1)
                         - (SELECT t.place FROM tickets t WHERE t.name = l.name ORDER BY t.ticket LIMIT 1) AS tickets
        FROM list(begins, after, ends, many) l
    ), sums AS (
        SELECT l.name, l.tickets, sum(l.tickets) OVER (ORDER BY l.tickets ROWS UNBOUNDED PRECEDING) AS up_to_here FROM lengths l
    )
    SELECT l.name, s.* FROM sums l CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE i.granted), count(*) FILTER (WHERE NOT i.granted),
               (array_agg(i.owner ORDER BY i.ticket) FILTER (WHERE i.granted))[1],
               (array_agg(i.age ORDER BY i.ticket) FILTER (WHERE i.granted))[1], max(i.age) FILTER (WHERE NOT i.granted)
        FROM inspect(CASE WHEN l.tickets <= 100 AND l.up_to_here <= 4000 THEN l.name END) i
    ) s ORDER BY l.name COLLATE "C";
END $f$;

-- The stored capacity of a name, and the id of its last change.
CREATE OR REPLACE FUNCTION stored(n text, OUT capacity int, OUT change uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
BEGIN
    SELECT x.capacity, x.change INTO capacity, change FROM names x WHERE x.name = n;
END $f$;

-- Stores a capacity, or takes it back (c is null). The change counts if `after` is the last change so far.
--
-- i the id of the change   stated: the capacity that tickets may have: the oldest, if none is stored; all, if it is taken back
-- in_use: the capacity of a ticket that forbids the change   capacity, change: as they are stored now
CREATE OR REPLACE FUNCTION resize(i uuid, n text, c int, after uuid, stated int, OUT in_use int, OUT capacity int, OUT change uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint := take(n); l walk; messages news[];
BEGIN
    l := settle(n, now);
    messages := l.granted;
    SELECT x.capacity, x.change INTO capacity, change FROM names x WHERE x.name = n;
    IF change IS DISTINCT FROM i AND change IS NOT DISTINCT FROM after THEN
        IF capacity IS NULL THEN
            in_use := nullif(l.capacity, stated);
        ELSIF c IS NULL THEN
            SELECT t.capacity INTO in_use FROM tickets t
            WHERE t.name = n AND t.expires_at > now AND t.capacity <> stated ORDER BY t.ticket LIMIT 1;
        END IF;
        IF in_use IS NULL THEN
            INSERT INTO names AS x (name, capacity, change, changed) VALUES (n, c, i, now)
            ON CONFLICT (name) DO UPDATE
            SET capacity = excluded.capacity, change = excluded.change, changed = excluded.changed;
            capacity := c; change := i;
            l := settle(n, now);
            messages := messages || l.granted;
        END IF;
    END IF;
    PERFORM tell(messages, '{}');
END $f$;

-- Forgets everything about a name that is not in use. The id of the last change of its capacity stays for a day, so that a
-- repetition of this change does nothing.
CREATE OR REPLACE FUNCTION forget(n text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE now bigint := take(n); youngest bigint;
BEGIN
    IF EXISTS (SELECT 1 FROM tickets t WHERE t.name = n AND t.expires_at > now) THEN RETURN; END IF;
    SELECT max(t.ticket) INTO youngest FROM tickets t WHERE t.name = n;
    IF youngest IS NOT NULL THEN
        PERFORM went(n, youngest);
        PERFORM remove(n, t.ticket) FROM tickets t WHERE t.name = n;
    END IF;
    DELETE FROM names x WHERE x.name = n AND x.change IS NULL;
    UPDATE names x SET capacity = NULL, changed = now WHERE x.name = n;
END $f$;

-- Reads a counter. `now` in s and `clock` in microseconds, both by the server's clock.
CREATE OR REPLACE FUNCTION counter(n text, OUT data bytea, OUT used bigint, OUT life bigint, OUT now bigint, OUT clock bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
BEGIN
    SELECT c.data, c.used, c.life INTO data, used, life FROM counters c WHERE c.name = n;
    clock := now_micros();
    now := clock / 1000000;
END $f$;

-- Writes a counter if its data is still `was` (null: no row), and tells the clients that watch it (null: nobody). No name is
-- locked here. Others see the row before the disk has it, so a read waits for the disk too: see `flush`.
CREATE OR REPLACE FUNCTION set_counter(n text, new bytea, was bytea, stays bigint, channel text, OUT written boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO counters AS c VALUES (n, new, now_micros() / 1000000, stays)
    ON CONFLICT (name) DO UPDATE SET data = excluded.data, used = excluded.used, life = excluded.life
    WHERE c.data IS NOT DISTINCT FROM was;
    written := FOUND;
    IF written AND channel IS NOT NULL AND coalesce(current_setting('lockcore1.quiet', true), '') <> 'on' THEN
        PERFORM pg_notify(channel, '');
    END IF;
END $f$;

-- One step of the sweep, which removes what nobody has used for long. A step looks at the next 200 names, locks at most 100
-- of them, and waits for none. `last` is where the next step begins; null after the last one. Nothing is granted by this: no
-- ticket is removed from a line with a live ticket.
CREATE OR REPLACE FUNCTION sweep(after text, OUT last text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE
    now bigint := now_micros(); day bigint := now - 86400000000; minute bigint := now - 60000000;
    n text := after; youngest bigint; locked int := 0;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR step IN 1..200 LOOP
        -- The line of a name whose tickets have all died may have no row in `names`.
        n := least((SELECT x.name FROM names x WHERE x.name > n ORDER BY x.name LIMIT 1),
                   (SELECT t.name FROM tickets t WHERE t.name > n ORDER BY t.name LIMIT 1));
        EXIT WHEN n IS NULL;
        CONTINUE WHEN EXISTS (SELECT 1 FROM tickets t WHERE t.name = n AND t.expires_at > minute);
        CONTINUE WHEN NOT EXISTS (SELECT 1 FROM tickets t WHERE t.name = n)
            AND EXISTS (SELECT 1 FROM names x WHERE x.name = n
                        AND (x.capacity IS NOT NULL OR x.last >= day OR coalesce(x.changed, 0) >= day));
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(1818583907, hashtext(n));
        locked := locked + 1;
        -- Now that nobody else changes the name, all is read again.
        SELECT max(t.ticket) INTO youngest FROM tickets t WHERE t.name = n HAVING max(t.expires_at) <= minute;
        IF youngest IS NOT NULL THEN
            PERFORM went(n, youngest);
            PERFORM remove(n, t.ticket) FROM tickets t WHERE t.name = n;
        END IF;
        DELETE FROM names x WHERE x.name = n AND x.capacity IS NULL AND x.last < day AND coalesce(x.changed, 0) < day
            AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.name = n);
        EXIT WHEN locked = 100;
    END LOOP;
    last := n;
    -- These read the whole table, so they come once, behind the last name.
    IF n IS NULL THEN
        DELETE FROM marks m WHERE m.id IN (SELECT d.id FROM marks d WHERE d.expires_at <= now FOR UPDATE SKIP LOCKED);
        DELETE FROM counters c WHERE c.name IN
            (SELECT d.name FROM counters d WHERE d.used + d.life < now / 1000000 FOR UPDATE SKIP LOCKED);
    END IF;
END $f$;

-- ---- what users call in a transaction of their own

-- Holds a lock to the end of this transaction: until then nobody else is granted the name, even if the lease ends or the ticket
-- is released. Fails with LC001 if the ticket has gone or its lease has ended. A ticket that waits here may hold for its client,
-- and keeps the younger ones out in the same way.
--
-- n: the name as in the table `tickets`   token: of the grant; above its lowest 10 bits it is the number of the ticket
--
-- The lock on the row lets a renewal pass, because that changes no key, and keeps `remove` off. If the ticket is removed at the
-- same moment, this waits for that, and finds none. A snapshot from before the grant would show the user data from before the
-- earlier holder's last write, although the lock is held. So only READ COMMITTED will do.
CREATE OR REPLACE FUNCTION hold(n text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = lockcore1, pg_temp AS $f$
DECLARE ends bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'lockcore: a transaction that holds a lock must be READ COMMITTED' USING ERRCODE = '22023';
    END IF;
    SELECT t.expires_at INTO ends FROM tickets t WHERE t.name = n AND t.ticket = token >> 10 FOR KEY SHARE;
    IF ends IS NULL OR ends <= now_micros() THEN
        RAISE EXCEPTION 'lockcore: the lock is not held under this token any more' USING ERRCODE = 'LC001';
    END IF;
END $f$;

-- Functions may be called by everybody unless this is taken back.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA lockcore1 FROM PUBLIC;
RESET search_path;
