-- The tables and procedures of lockcore for MariaDB 10.6 and MySQL 8.0, and later versions. A client that finds them missing, or
-- finds procedures of an earlier version, runs this file, if it has the right. Otherwise a person runs it, in the database of
-- the URL: mariadb DATABASE < lockcore1.sql
--
-- The tables, and the names, the parameters and the answers of the procedures in the second list below are wire format: a
-- change makes other tables, with another number. Clients of several versions use them at the same time, with the procedures of
-- the latest one. So a later version of this file may change what is inside of procedures, and add procedures. A procedure that
-- gets another meaning gets another name.
--
-- Only the procedures in the second list are called by clients. A client needs EXECUTE on these, and no right on a table.
--
-- Times are in microseconds of UTC. They are of the wall clock of the server, and are read when the name is locked.
DELIMITER //

SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION' //

-- One session at a time runs this file. The lock is that of the session, so it ends with it. A client that finds the procedures
-- missing, or that is to replace them, waits for it too.
DO GET_LOCK(CONCAT('lockcore1 ', MD5(DATABASE())), 60) //

-- Fails if another session has the lock, or if the procedures of a later version are there: those serve earlier clients too.
DROP PROCEDURE IF EXISTS lockcore1_replace //
CREATE PROCEDURE lockcore1_replace(IN version INT)
BEGIN
    DECLARE there INT;
    IF NOT IS_USED_LOCK(CONCAT('lockcore1 ', MD5(DATABASE()))) <=> CONNECTION_ID() THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'another session makes the procedures of lockcore; run this file in one session';
    END IF;
    -- Its text is SELECT <version> AS version.
    SELECT MAX(CAST(SUBSTRING_INDEX(SUBSTRING_INDEX(r.ROUTINE_DEFINITION, ' ', 2), ' ', -1) AS SIGNED)) INTO there
        FROM information_schema.ROUTINES AS r
        WHERE r.ROUTINE_SCHEMA = DATABASE() AND r.ROUTINE_NAME = 'lockcore1_version';
    IF there > version THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the procedures of a later version of lockcore are there; they stay';
    END IF;
END //
CALL lockcore1_replace(3) //
DROP PROCEDURE lockcore1_replace //

-- Made last. So if this file ends in the middle, a client finds that something is missing.
DROP PROCEDURE IF EXISTS lockcore1_version //

-- One row for each name that was used lately, or that has a stored capacity. Every verb locks this row first. The row stays for
-- a day after `last`, because `last` keeps the numbers rising.
CREATE TABLE IF NOT EXISTS lockcore1_names (
    name       VARBINARY(700) NOT NULL PRIMARY KEY, -- namespace:layout version:{name}
    last       BIGINT NOT NULL DEFAULT 0,           -- no ticket that has gone had a greater number
    first      BIGINT NOT NULL DEFAULT 0,           -- no ticket that is there has a smaller number: walks begin here
    capacity   INT,                                 -- the stored capacity
    change_id  BINARY(16),                          -- the id of its last change
    changed    BIGINT NOT NULL DEFAULT 0            -- when that was
) ENGINE = InnoDB //

-- One row for each ticket, for holders and waiters alike. No index has a column that a renewal or a grant changes.
CREATE TABLE IF NOT EXISTS lockcore1_tickets (
    name        VARBINARY(700) NOT NULL,
    ticket      BIGINT NOT NULL,
    id          BINARY(16) NOT NULL,
    permits     INT NOT NULL,
    capacity    INT NOT NULL,     -- as the request stated it
    ttl         BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    granted     BOOLEAN NOT NULL, -- set once, and never unset: a smaller capacity takes nothing back
    place       BIGINT NOT NULL,  -- one more than that of the ticket before, so the length of a line need not be counted
    receiver    BIGINT NOT NULL,  -- the connection that looks for it
    owner       VARBINARY(2000) NOT NULL, -- host/pid/client, for people; an ask-back stands behind it, after a line break
    PRIMARY KEY (name, ticket),
    UNIQUE KEY (id)
) ENGINE = InnoDB //

-- The ids that were released while their enqueue could still arrive.
CREATE TABLE IF NOT EXISTS lockcore1_marks (
    id          BINARY(16) NOT NULL PRIMARY KEY,
    name        VARBINARY(700) NOT NULL,
    expires_at  BIGINT NOT NULL
) ENGINE = InnoDB //

-- Counters, and values of locks.
CREATE TABLE IF NOT EXISTS lockcore1_counters (
    name  VARBINARY(700) NOT NULL PRIMARY KEY,
    data  MEDIUMBLOB NOT NULL, -- a text: value, generation, version, the changes of the last minute, the text of a value
    used  BIGINT NOT NULL,     -- when, in s
    life  BIGINT NOT NULL      -- for how many s the row stays after that
) ENGINE = InnoDB //

-- ---- inside

-- The law: every verb locks the row of its name before it reads anything else. A verb that has locked a name waits for no other
-- one: it skips those that are locked. So verbs wait for each other here only, and never in a circle, and a name that somebody has
-- locked holds up no other. A plain read behind it sees what was committed by then.
--
-- A plain read is a SELECT … INTO. In an expression, such as that of an IF or a SET, a SELECT locks what it reads.
--
-- A verb for several names skips a name too if somebody else has locked the row of a ticket that it is to change. It has changed
-- nothing of this name then.
--
-- An INSERT IGNORE in front would take a shared lock on a row that is there. Two clients that both have it, and both want to lock
-- the row, would be a deadlock.
--
-- waits: whether to wait for the row, and to make it if it is missing
-- highest: no ticket that has gone had a greater number; null if the name is skipped   cap: the stored capacity
DROP PROCEDURE IF EXISTS lockcore1_take //
CREATE PROCEDURE lockcore1_take(IN n VARBINARY(700), IN waits BOOLEAN, OUT moment BIGINT, OUT highest BIGINT, OUT cap INT)
BEGIN
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    -- The setting does not bind the user in whose name the procedures run, if it may do everything.
    IF @@GLOBAL.read_only THEN
        SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'this server is read-only, and takes no locks';
    END IF;
    SET highest = NULL, cap = NULL;
    IF waits THEN
        SELECT x.last, x.capacity INTO highest, cap FROM lockcore1_names AS x WHERE x.name = n FOR UPDATE;
        IF highest IS NULL THEN
            INSERT INTO lockcore1_names (name) VALUES (n) ON DUPLICATE KEY UPDATE last = last;
            SELECT x.last, x.capacity INTO highest, cap FROM lockcore1_names AS x WHERE x.name = n FOR UPDATE;
        END IF;
    ELSE
        SELECT x.last, x.capacity INTO highest, cap FROM lockcore1_names AS x WHERE x.name = n FOR UPDATE SKIP LOCKED;
    END IF;
    SET moment = TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
END //

-- The youngest ticket of a name has gone: numbers go on behind it.
DROP PROCEDURE IF EXISTS lockcore1_went //
CREATE PROCEDURE lockcore1_went(IN n VARBINARY(700), IN number BIGINT, INOUT highest BIGINT)
BEGIN
    IF number > highest THEN
        SET highest = number;
        UPDATE lockcore1_names SET last = number WHERE name = n;
    END IF;
END //

-- Walks along the line of a name: removes the dead in front of the first live waiter, and grants what fits.
--
-- begins: where, if that is known: `first` of the name
-- waits: whether to wait for tickets that somebody else has locked. If not, the walk ends in front of one that is to be removed or
-- granted, and `barred` is true: the name is to be rolled back
-- held: permits   soonest: when the first of the holders expires   waiter: the first ticket that waits
-- oldest, oldest_place: the capacity and the place of the oldest ticket   told: <receiver>:<id>:<ticket>, for each grant
DROP PROCEDURE IF EXISTS lockcore1_walk //
CREATE PROCEDURE lockcore1_walk(IN n VARBINARY(700), IN moment BIGINT, IN cap INT, IN begins BIGINT, IN waits BOOLEAN,
    INOUT highest BIGINT, OUT held BIGINT, OUT soonest BIGINT, OUT waiter BIGINT, OUT oldest INT, OUT oldest_place BIGINT,
    INOUT told MEDIUMTEXT, OUT barred BOOLEAN)
BEGIN
    DECLARE pos BIGINT DEFAULT begins - 1;
    DECLARE number, ends, heard, spot BIGINT;
    DECLARE gone, there BIGINT DEFAULT -1;
    DECLARE p, c INT;
    DECLARE g BOOLEAN;
    DECLARE i BINARY(16);
    DECLARE CONTINUE HANDLER FOR NOT FOUND SET number = NULL;
    SET held = 0, soonest = NULL, waiter = NULL, oldest = NULL, oldest_place = NULL, barred = FALSE;
    IF pos IS NULL THEN SELECT x.first - 1 INTO pos FROM lockcore1_names AS x WHERE x.name = n; END IF;
    walk: LOOP
        -- One step of the walk. A cursor would copy the whole line.
        SELECT t.ticket, t.id, t.permits, t.capacity, t.expires_at, t.granted, t.receiver, t.place
            INTO number, i, p, c, ends, g, heard, spot
            FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket > pos ORDER BY t.ticket LIMIT 1;
        IF number IS NULL THEN LEAVE walk; END IF;
        SET pos = number;
        IF NOT waits AND (ends <= moment OR (NOT g AND held + p <= COALESCE(cap, c))) THEN
            SET barred = TRUE;
            SELECT FALSE INTO barred FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket = pos FOR UPDATE SKIP LOCKED;
            IF barred THEN LEAVE walk; END IF;
        END IF;
        IF ends <= moment THEN
            DELETE FROM lockcore1_tickets WHERE name = n AND ticket = pos;
            SET gone = pos;
            ITERATE walk;
        END IF;
        IF oldest IS NULL THEN
            SET oldest = c, oldest_place = spot;
            -- Removed rows stay in the table for a while. No walk begins among them.
            IF spot % 100 = 0 AND spot > 0 THEN UPDATE lockcore1_names SET first = pos WHERE name = n; END IF;
        END IF;
        SET there = pos;
        IF NOT g THEN
            IF held + p > COALESCE(cap, c) THEN
                SET waiter = pos;
                LEAVE walk;
            END IF;
            UPDATE lockcore1_tickets SET granted = TRUE WHERE name = n AND ticket = pos;
            SET told = CONCAT(told, heard, ':', HEX(i), ':', pos, ',');
        END IF;
        SET held = held + p, soonest = LEAST(COALESCE(soonest, ends), ends);
    END LOOP;
    IF gone > there THEN CALL lockcore1_went(n, gone, highest); END IF;
END //

-- Removes tickets. The parameter and the answers are those of a release.
DROP PROCEDURE IF EXISTS lockcore1_leave //
CREATE PROCEDURE lockcore1_leave(IN asked MEDIUMBLOB, OUT answers MEDIUMTEXT, INOUT told MEDIUMTEXT)
BEGIN
    DECLARE pos BIGINT DEFAULT 1;
    DECLARE begins, step, length, moment, highest, held, soonest, waiter, oldest_place, number, youngest BIGINT;
    DECLARE cap, oldest INT;
    DECLARE waits, barred, holds BOOLEAN;
    DECLARE i BINARY(16);
    DECLARE n VARBINARY(700);
    DECLARE own_answers, own_told MEDIUMTEXT;
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    SET answers = '';
    names: WHILE pos < LENGTH(asked) DO
        SET length = CONV(HEX(SUBSTR(asked, pos, 2)), 16, 10);
        SET n = SUBSTR(asked, pos + 2, length), begins = pos + length + 4, step = begins;
        SET pos = begins + 17 * CONV(HEX(SUBSTR(asked, begins - 2, 2)), 16, 10);
        SET waits = COALESCE(waits, pos > LENGTH(asked)); -- if it is the only name, and no byte follows
        CALL lockcore1_take(n, waits, moment, highest, cap);
        IF highest IS NULL THEN
            SET answers = CONCAT(answers, REPEAT('-', (pos - begins) DIV 17));
            ITERATE names;
        END IF;
        IF NOT waits THEN SAVEPOINT lockcore1; END IF;
        SET youngest = NULL, barred = FALSE, own_answers = '', own_told = '';
        WHILE step < pos AND NOT barred DO
            SET i = SUBSTR(asked, step, 16), number = NULL;
            IF waits THEN
                SELECT t.ticket INTO number FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n FOR UPDATE;
            ELSE
                SELECT t.ticket INTO number FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n FOR UPDATE SKIP LOCKED;
                IF number IS NULL THEN SELECT TRUE INTO barred FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n; END IF;
            END IF;
            IF SUBSTR(asked, step + 16, 1) = X'01' AND NOT barred THEN
                INSERT INTO lockcore1_marks VALUES (i, n, moment + 60000000) ON DUPLICATE KEY UPDATE expires_at = moment + 60000000;
            END IF;
            IF number IS NOT NULL THEN
                DELETE FROM lockcore1_tickets WHERE name = n AND ticket = number;
                SET youngest = GREATEST(COALESCE(youngest, number), number);
            END IF;
            SET own_answers = CONCAT(own_answers, IF(number IS NULL, '0', '1')), step = step + 17;
        END WHILE;
        IF youngest IS NOT NULL AND NOT barred THEN
            SET number = NULL, holds = NULL;
            SELECT t.ticket, t.granted INTO number, holds
                FROM lockcore1_tickets AS t WHERE t.name = n ORDER BY t.ticket DESC LIMIT 1;
            IF number IS NULL OR number < youngest THEN CALL lockcore1_went(n, youngest, highest); END IF;
            IF NOT holds THEN
                CALL lockcore1_walk(n, moment, cap, NULL, waits, highest, held, soonest, waiter, oldest, oldest_place, own_told,
                    barred);
            END IF;
        END IF;
        IF barred THEN
            ROLLBACK TO SAVEPOINT lockcore1;
            SET answers = CONCAT(answers, REPEAT('-', (pos - begins) DIV 17));
        ELSE
            SET answers = CONCAT(answers, own_answers), told = CONCAT(told, own_told);
        END IF;
    END WHILE names;
END //

-- ---- what clients call
--
-- A verb is one transaction, and answers behind its commit. So no answer is of something that was rolled back, and no client
-- that reads slowly keeps a name locked. If a verb fails, it rolls back by itself. A read is a transaction too, and locks nothing.

-- Takes a ticket. If an earlier attempt with the same id has left one, finds that ticket and renews it.
--
-- p permits   c capacity   lives ttl   waits: whether to stand in line   seen: the highest number that the client has seen
-- me receiver   own owner
-- outcome 0 granted, 1 waiting, 2 busy, 3 another capacity is in use, 4 gone, 5 numbers are exhausted
DROP PROCEDURE IF EXISTS lockcore1_enqueue //
CREATE PROCEDURE lockcore1_enqueue(IN i BINARY(16), IN n VARBINARY(700), IN p INT, IN c INT, IN lives BIGINT, IN waits BOOLEAN,
    IN seen BIGINT, IN me BIGINT, IN own VARBINARY(2000))
BEGIN
    DECLARE moment, highest, begins, number, again BIGINT;
    DECLARE kind INT DEFAULT 0;
    DECLARE cap, other INT;
    DECLARE others, marked BOOLEAN;
    DECLARE told MEDIUMTEXT DEFAULT '';
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    -- What `take` does, without the call.
    SELECT x.last, x.capacity, x.first INTO highest, cap, begins FROM lockcore1_names AS x WHERE x.name = n FOR UPDATE;
    IF highest IS NULL OR @@GLOBAL.read_only THEN CALL lockcore1_take(n, TRUE, moment, highest, cap); END IF;
    SET moment = TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    -- Numbers only rise: above the last one and the one in front, and not below the clock. A number that the client has
    -- seen counts if it is at most a day ahead. Otherwise one wrong clock would spoil all numbers.
    SET number = GREATEST(moment, highest + 1, IF(seen <= moment + 86400000000, seen + 1, 0));
    SELECT EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n),
        EXISTS (SELECT 1 FROM lockcore1_marks AS m WHERE m.id = i) INTO others, marked;
    IF NOT (others OR marked OR cap IS NOT NULL OR p > c OR number > 9007199254740991) THEN
        INSERT INTO lockcore1_tickets VALUES (n, number, i, p, c, lives, moment + lives, TRUE, 0, me, own);
    ELSE verb: BEGIN
        DECLARE least BIGINT DEFAULT number;
        DECLARE soonest, waiter, oldest_place, mine, ends, youngest, behind BIGINT;
        DECLARE held, many BIGINT DEFAULT 0;
        DECLARE oldest INT;
        DECLARE holds, barred BOOLEAN;
        DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
        SET number = NULL;
        SELECT t.ticket, t.expires_at INTO mine, ends FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n;
        IF mine IS NOT NULL THEN
            IF ends <= moment THEN -- an earlier attempt took it, and it has died since
                DELETE FROM lockcore1_tickets WHERE name = n AND ticket = mine;
                CALL lockcore1_went(n, mine, highest);
                CALL lockcore1_walk(n, moment, cap, begins, TRUE, highest, held, soonest, waiter, oldest, oldest_place,
                    told, barred);
                SET kind = 4;
                LEAVE verb;
            END IF;
            UPDATE lockcore1_tickets SET expires_at = moment + lives, ttl = lives, receiver = me WHERE name = n AND ticket = mine;
            CALL lockcore1_walk(n, moment, cap, begins, TRUE, highest, held, soonest, waiter, oldest, oldest_place,
                told, barred);
            SELECT IF(t.granted, 0, 1) INTO kind FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket = mine;
            SET number = mine, again = IF(waiter = mine, soonest - moment, NULL);
            LEAVE verb;
        END IF;
        IF marked THEN
            SELECT 4 INTO kind FROM lockcore1_marks AS m WHERE m.id = i AND m.expires_at > moment;
            IF kind = 4 THEN LEAVE verb; END IF;
        END IF;
        IF others THEN
            SELECT t.ticket, t.place INTO youngest, behind
                FROM lockcore1_tickets AS t WHERE t.name = n ORDER BY t.ticket DESC LIMIT 1;
            CALL lockcore1_walk(n, moment, cap, begins, TRUE, highest, held, soonest, waiter, oldest, oldest_place,
                told, barred);
            IF oldest IS NULL THEN SET youngest = NULL, behind = NULL; END IF; -- all were dead
        END IF;
        -- While a capacity is stored, any stated one will do, but a mutex is refused.
        SET other = IF(cap IS NULL, NULLIF(oldest, c), IF(c = 1073741824, cap, NULL));
        IF other IS NOT NULL THEN
            SET kind = 3;
            LEAVE verb;
        END IF;
        SET holds = waiter IS NULL AND held + p <= COALESCE(cap, c);
        IF behind - oldest_place >= 9999 THEN SELECT COUNT(*) INTO many FROM lockcore1_tickets AS t WHERE t.name = n; END IF;
        IF NOT holds AND (NOT waits OR many >= 10000) THEN
            SET kind = 2, again = soonest - moment;
            LEAVE verb;
        END IF;
        SET number = GREATEST(least, highest + 1, COALESCE(youngest + 1, 0));
        IF number > 9007199254740991 THEN
            SET kind = 5, number = NULL;
            LEAVE verb;
        END IF;
        INSERT INTO lockcore1_tickets
        VALUES (n, number, i, p, c, lives, moment + lives, holds, COALESCE(behind + 1, 0), me, own);
        SET kind = IF(holds, 0, 1), again = IF(NOT holds AND waiter IS NULL, soonest - moment, NULL);
    END; END IF;
    COMMIT;
    SELECT kind AS outcome, number AS ticket, again AS soonest_in, other AS in_use, told;
END //

-- Extends tickets to their new ttl, counted from now, and makes those smaller that are to keep fewer permits.
--
-- asked: for each name, in ascending order: its length (2 bytes), the name, the number of its tickets (2 bytes), and for each of
-- these its id, how many permits it keeps at most (4 bytes), and its ttl (8 bytes). A call for one name waits for it, unless a
-- single byte follows.
-- answers: for each ticket <number>,<holds>,<ttl>,<soonest_in>,<owner in hex, only if somebody asks for the ticket>; without a
-- number it is lost; a single - if its name is skipped
DROP PROCEDURE IF EXISTS lockcore1_renew //
CREATE PROCEDURE lockcore1_renew(IN asked MEDIUMBLOB)
BEGIN
    DECLARE pos BIGINT DEFAULT 1;
    DECLARE begins, step, length, moment, highest, held, soonest, waiter, oldest_place, keeps, lives, number, ends, life BIGINT;
    DECLARE cap, oldest INT;
    DECLARE waits, found, barred, g BOOLEAN;
    DECLARE i BINARY(16);
    DECLARE n VARBINARY(700);
    DECLARE own VARBINARY(2000);
    DECLARE told, answers MEDIUMTEXT DEFAULT '';
    DECLARE own_told, own_answers MEDIUMTEXT;
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    names: WHILE pos < LENGTH(asked) DO
        SET length = CONV(HEX(SUBSTR(asked, pos, 2)), 16, 10);
        SET n = SUBSTR(asked, pos + 2, length), begins = pos + length + 4;
        SET pos = begins + 28 * CONV(HEX(SUBSTR(asked, begins - 2, 2)), 16, 10), step = begins;
        SET waits = COALESCE(waits, pos > LENGTH(asked)); -- if it is the only name, and no byte follows
        CALL lockcore1_take(n, waits, moment, highest, cap);
        IF highest IS NULL THEN
            SET answers = CONCAT(answers, REPEAT('-;', (pos - begins) DIV 28));
            ITERATE names;
        END IF;
        IF NOT waits THEN SAVEPOINT lockcore1; END IF;
        SET own_answers = '', own_told = '', found = FALSE, barred = FALSE, waiter = NULL;
        WHILE step < pos AND NOT barred DO
            SET i = SUBSTR(asked, step, 16), keeps = CONV(HEX(SUBSTR(asked, step + 16, 4)), 16, 10);
            SET lives = CONV(HEX(SUBSTR(asked, step + 20, 8)), 16, 10), step = step + 28, number = NULL;
            IF waits THEN
                SELECT t.ticket, t.granted, t.owner, t.expires_at INTO number, g, own, ends
                    FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n FOR UPDATE;
            ELSE
                SELECT t.ticket, t.granted, t.owner, t.expires_at INTO number, g, own, ends
                    FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n FOR UPDATE SKIP LOCKED;
                IF number IS NULL THEN SELECT TRUE INTO barred FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n; END IF;
            END IF;
            SET found = found OR number IS NOT NULL;
            IF number IS NULL OR ends <= moment THEN
                SET own_answers = CONCAT(own_answers, ',,,,;');
            ELSE
                UPDATE lockcore1_tickets SET expires_at = moment + lives, ttl = lives, permits = LEAST(permits, keeps)
                    WHERE name = n AND ticket = number;
                SET own_answers = CONCAT(own_answers, number, ',', g, ',', lives, ',,', IF(LOCATE(X'0A', own), HEX(own), ''), ';');
            END IF;
        END WHILE;
        -- No ticket that waits stands in front of one that holds. So the renewal of holders that nobody waits for needs no walk.
        -- Nor does a renewal that finds none of its tickets change anything. If it finds one that has ended, the walk removes it.
        IF found AND NOT barred THEN
            SELECT t.granted INTO g FROM lockcore1_tickets AS t WHERE t.name = n ORDER BY t.ticket DESC LIMIT 1;
        END IF;
        IF found AND NOT barred AND NOT g THEN
            CALL lockcore1_walk(n, moment, cap, NULL, waits, highest, held, soonest, waiter, oldest, oldest_place,
                own_told, barred);
            -- The walk may have granted some of them.
            SET step = begins, own_answers = '';
            WHILE step < pos DO
                SET i = SUBSTR(asked, step, 16), step = step + 28, number = NULL;
                SELECT t.ticket, t.granted, t.ttl, t.owner INTO number, g, life, own
                    FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n AND t.expires_at > moment;
                SET own_answers = CONCAT(own_answers, IF(number IS NULL, ',,,,;', CONCAT(number, ',', g, ',', life, ',',
                    COALESCE(IF(waiter = number, soonest - moment, NULL), ''), ',', IF(LOCATE(X'0A', own), HEX(own), ''), ';')));
            END WHILE;
        END IF;
        IF barred THEN
            ROLLBACK TO SAVEPOINT lockcore1;
            SET answers = CONCAT(answers, REPEAT('-;', (pos - begins) DIV 28));
        ELSE
            SET answers = CONCAT(answers, own_answers), told = CONCAT(told, own_told);
        END IF;
    END WHILE names;
    COMMIT;
    SELECT answers, told;
END //

-- Removes tickets, and grants what fits then.
--
-- asked: as for a renewal, but for each ticket its id, and one byte that is 1 to leave a mark for a late enqueue
-- answers: for each ticket 1 if it was there, 0 if not, and - if its name is skipped
DROP PROCEDURE IF EXISTS lockcore1_release //
CREATE PROCEDURE lockcore1_release(IN asked MEDIUMBLOB)
BEGIN
    DECLARE n VARBINARY(700) DEFAULT SUBSTR(asked, 3, CONV(HEX(LEFT(asked, 2)), 16, 10));
    DECLARE i BINARY(16);
    DECLARE holds BOOLEAN;
    DECLARE answers MEDIUMTEXT;
    DECLARE told MEDIUMTEXT DEFAULT '';
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    -- A single ticket, without a mark: in most calls.
    IF LENGTH(asked) = LENGTH(n) + 21 AND RIGHT(asked, 1) = X'00' AND NOT @@GLOBAL.read_only THEN
        SET i = SUBSTR(asked, LENGTH(n) + 5, 16);
        -- This locks the name. It reads the number of the ticket before that. The number never changes.
        UPDATE lockcore1_names SET last = GREATEST(last,
            COALESCE((SELECT t.ticket FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n), 0)) WHERE name = n;
        -- If this has changed nothing, the ticket or the name is missing, or a younger one has gone before.
        IF ROW_COUNT() > 0 THEN
            DELETE FROM lockcore1_tickets WHERE id = i AND name = n;
            SET answers = ROW_COUNT();
            SELECT t.granted INTO holds FROM lockcore1_tickets AS t WHERE t.name = n ORDER BY t.ticket DESC LIMIT 1;
            IF NOT holds THEN BEGIN
                DECLARE moment, highest, begins, held, soonest, waiter, oldest_place BIGINT;
                DECLARE cap, oldest INT;
                DECLARE barred BOOLEAN;
                SELECT x.last, x.capacity, x.first INTO highest, cap, begins FROM lockcore1_names AS x WHERE x.name = n;
                SET moment = TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
                CALL lockcore1_walk(n, moment, cap, begins, TRUE, highest, held, soonest, waiter, oldest, oldest_place,
                    told, barred);
            END; END IF;
        END IF;
    END IF;
    IF answers IS NULL THEN CALL lockcore1_leave(asked, answers, told); END IF;
    COMMIT;
    SELECT answers, told;
END //

-- Gives a ticket that holds to another client. It keeps its number, its permits and its place, and an ask-back behind its
-- owner. `ticket` is null, and nothing has changed, if there is no such ticket, if it waits, or if the new id was released.
--
-- was, number: the id so far and the number   i the new id   marked: leave a mark for the id so far
DROP PROCEDURE IF EXISTS lockcore1_adopt //
CREATE PROCEDURE lockcore1_adopt(IN n VARBINARY(700), IN was BINARY(16), IN number BIGINT, IN p INT, IN c INT, IN i BINARY(16),
    IN lives BIGINT, IN me BIGINT, IN own VARBINARY(2000), IN marked BOOLEAN)
BEGIN
    DECLARE moment, highest, held, soonest, waiter, oldest_place BIGINT;
    DECLARE cap, oldest INT;
    DECLARE given, barred BOOLEAN;
    DECLARE told MEDIUMTEXT DEFAULT '';
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL lockcore1_take(n, TRUE, moment, highest, cap);
    CALL lockcore1_walk(n, moment, cap, NULL, TRUE, highest, held, soonest, waiter, oldest, oldest_place, told, barred);
    -- Not the count of an UPDATE: one that changes nothing counts no row.
    SELECT EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket = number AND t.id IN (was, i)
            AND t.granted AND t.expires_at > moment AND t.permits = p AND t.capacity = c)
        AND NOT EXISTS (SELECT 1 FROM lockcore1_marks AS m WHERE m.id = i AND m.expires_at > moment) INTO given;
    IF given THEN
        UPDATE lockcore1_tickets SET id = i, ttl = lives, expires_at = moment + lives, receiver = me,
            owner = CONCAT(own, IF(LOCATE(X'0A', owner), SUBSTR(owner, LOCATE(X'0A', owner)), ''))
        WHERE name = n AND ticket = number;
        IF marked THEN
            INSERT INTO lockcore1_marks VALUES (was, n, moment + 60000000) ON DUPLICATE KEY UPDATE expires_at = moment + 60000000;
        END IF;
    END IF;
    COMMIT;
    SELECT IF(given, number, NULL) AS ticket, told;
END //

-- Asks the client of a ticket to give it up: writes the ask-back behind the owner. `receiver` is null if the ticket is not there.
DROP PROCEDURE IF EXISTS lockcore1_ask_back //
CREATE PROCEDURE lockcore1_ask_back(IN n VARBINARY(700), IN i BINARY(16), IN ask VARBINARY(700))
BEGIN
    DECLARE moment, highest, heard BIGINT;
    DECLARE cap INT;
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL lockcore1_take(n, TRUE, moment, highest, cap);
    SELECT t.receiver INTO heard FROM lockcore1_tickets AS t WHERE t.id = i AND t.name = n AND t.expires_at > moment;
    IF heard IS NOT NULL THEN
        UPDATE lockcore1_tickets SET owner = CONCAT(SUBSTRING_INDEX(owner, X'0A', 1), X'0A', ask) WHERE id = i AND name = n;
    END IF;
    COMMIT;
    SELECT heard AS receiver;
END //

-- What the first tickets that wait in a process find. A plain read, which locks nothing.
--
-- asked: for each ticket the length of its name (2 bytes), the name, and its number (8 bytes)
-- answers: for each ticket <holds>,<soonest_in>,<head>; `holds` is empty if it is gone, `soonest_in` is empty if it is not the
-- first that waits, and `head` is the number of the oldest ticket in the line
DROP PROCEDURE IF EXISTS lockcore1_look //
CREATE PROCEDURE lockcore1_look(IN asked MEDIUMBLOB)
BEGIN
    DECLARE pos BIGINT DEFAULT 1;
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE length, number, head, soonest BIGINT;
    DECLARE g BOOLEAN;
    DECLARE n VARBINARY(700);
    DECLARE answers MEDIUMTEXT DEFAULT '';
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    WHILE pos <= LENGTH(asked) DO
        SET length = CONV(HEX(SUBSTR(asked, pos, 2)), 16, 10);
        SET n = SUBSTR(asked, pos + 2, length), number = CONV(HEX(SUBSTR(asked, pos + 2 + length, 8)), 16, 10);
        SET pos = pos + 10 + length, g = NULL, head = NULL, soonest = NULL;
        SELECT t.granted INTO g FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket = number AND t.expires_at > moment;
        IF NOT g THEN
            SELECT t.ticket INTO head FROM lockcore1_tickets AS t WHERE t.name = n ORDER BY t.ticket LIMIT 1;
            SELECT t.granted INTO g FROM lockcore1_tickets AS t
                WHERE t.name = n AND t.ticket < number ORDER BY t.ticket DESC LIMIT 1;
            IF g OR head = number THEN -- no other one waits in front
                SELECT MIN(t.expires_at) INTO soonest FROM lockcore1_tickets AS t WHERE t.name = n AND t.ticket < number;
            ELSE
                SELECT t.expires_at INTO soonest FROM lockcore1_tickets AS t
                    WHERE t.name = n AND NOT t.granted ORDER BY t.ticket LIMIT 1;
                IF soonest > moment THEN SET soonest = NULL; END IF;
            END IF;
            SET g = FALSE;
        END IF;
        SET answers = CONCAT(answers, COALESCE(g, ''), ',', COALESCE(GREATEST(soonest - moment, 0), ''), ',', COALESCE(head, ''), ';');
    END WHILE;
    COMMIT;
    SELECT answers;
END //

-- The live tickets of a name, oldest first. A ticket that holds because one in front has died is shown as a holder, although
-- nobody has noticed that yet.
DROP PROCEDURE IF EXISTS lockcore1_inspect //
CREATE PROCEDURE lockcore1_inspect(IN n VARBINARY(700))
BEGIN
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    SELECT t.ticket,
        t.granted OR SUM(t.permits) OVER (ORDER BY t.ticket ROWS UNBOUNDED PRECEDING) <= COALESCE(x.capacity, t.capacity) AS granted,
        t.permits, COALESCE(x.capacity, t.capacity) AS capacity, t.expires_at - moment AS remaining,
        GREATEST(moment - t.ticket, 0) AS age, t.owner, t.id
    FROM lockcore1_tickets AS t LEFT JOIN lockcore1_names AS x ON x.name = t.name
    WHERE t.name = n AND t.expires_at > moment ORDER BY t.ticket;
    COMMIT;
END //

-- Names that have a live ticket, in order, from `begins` to before `ends`, and behind `after_name`: a list of texts in JSON, in
-- hexadecimal. One look into the index for each name, however many tickets it has.
DROP PROCEDURE IF EXISTS lockcore1_page //
CREATE PROCEDURE lockcore1_page(IN begins VARBINARY(3000), IN after_name VARBINARY(3000), IN ends VARBINARY(3000), IN many INT,
    IN moment BIGINT, OUT page MEDIUMTEXT CHARACTER SET utf8mb4)
BEGIN
    DECLARE n, pos VARBINARY(3000) DEFAULT after_name;
    DECLARE lives BOOLEAN;
    DECLARE CONTINUE HANDLER FOR NOT FOUND SET n = NULL;
    SET page = '';
    names: WHILE many > 0 DO
        SELECT t.name INTO n FROM lockcore1_tickets AS t
            WHERE t.name >= begins AND t.name > pos AND t.name < ends ORDER BY t.name LIMIT 1;
        IF n IS NULL THEN LEAVE names; END IF;
        SET pos = n;
        SELECT EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n AND t.expires_at > moment) INTO lives;
        IF lives THEN
            SET page = CONCAT(page, IF(page = '', '"', ',"'), HEX(n), '"'), many = many - 1;
        END IF;
    END WHILE names;
    SET page = CONCAT('[', page, ']');
END //

-- The names of such a page.
DROP PROCEDURE IF EXISTS lockcore1_list //
CREATE PROCEDURE lockcore1_list(IN begins VARBINARY(3000), IN after_name VARBINARY(3000), IN ends VARBINARY(3000), IN many INT)
BEGIN
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE page MEDIUMTEXT CHARACTER SET utf8mb4;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    CALL lockcore1_page(begins, after_name, ends, many, moment, page);
    SELECT UNHEX(j.name) AS name FROM JSON_TABLE(page, '$[*]' COLUMNS (name VARCHAR(1400) PATH '$')) AS j ORDER BY name;
    COMMIT;
END //

-- The same, each with a summary of its line: how many tickets hold and wait, the owner and the age of the oldest that holds, and
-- the greatest age of those that wait. All tickets of a line are read for this, so a line with more than about 100 is not summed
-- up. The other lines are summed up until about 4,000 tickets are read, the shortest first. The remaining names have nulls.
DROP PROCEDURE IF EXISTS lockcore1_overview //
CREATE PROCEDURE lockcore1_overview(IN begins VARBINARY(3000), IN after_name VARBINARY(3000), IN ends VARBINARY(3000),
    IN many INT)
BEGIN
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE page MEDIUMTEXT CHARACTER SET utf8mb4;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    CALL lockcore1_page(begins, after_name, ends, many, moment, page);
    WITH used AS (
        SELECT UNHEX(j.name) AS name
        FROM JSON_TABLE(page, '$[*]' COLUMNS (name VARCHAR(1400) PATH '$')) AS j
    ), lengths AS (
        SELECT u.name, 1 + (SELECT t.place FROM lockcore1_tickets AS t WHERE t.name = u.name ORDER BY t.ticket DESC LIMIT 1)
                         - (SELECT t.place FROM lockcore1_tickets AS t WHERE t.name = u.name ORDER BY t.ticket LIMIT 1) AS tickets
        FROM used AS u
    ), sums AS (
        SELECT l.name, l.tickets, SUM(l.tickets) OVER (ORDER BY l.tickets ROWS UNBOUNDED PRECEDING) AS up_to_here FROM lengths AS l
    ), places AS (
        SELECT STRAIGHT_JOIN s.name, t.ticket,
            t.granted OR SUM(t.permits) OVER (PARTITION BY s.name ORDER BY t.ticket ROWS UNBOUNDED PRECEDING)
                <= COALESCE(x.capacity, t.capacity) AS granted
        FROM sums AS s JOIN lockcore1_tickets AS t ON t.name = s.name LEFT JOIN lockcore1_names AS x ON x.name = s.name
        WHERE s.tickets <= 100 AND s.up_to_here <= 4000 AND t.expires_at > moment
    ), sides AS (
        SELECT p.name, SUM(p.granted) AS holders, SUM(NOT p.granted) AS waiters,
            MIN(CASE WHEN p.granted THEN p.ticket END) AS holder, MIN(CASE WHEN NOT p.granted THEN p.ticket END) AS waiter
        FROM places AS p GROUP BY p.name
    )
    SELECT u.name, l.holders, l.waiters, t.owner, GREATEST(moment - l.holder, 0) AS since,
        GREATEST(moment - l.waiter, 0) AS longest_wait
    FROM used AS u LEFT JOIN sides AS l ON l.name = u.name
        LEFT JOIN lockcore1_tickets AS t ON t.name = l.name AND t.ticket = l.holder
    ORDER BY u.name;
    COMMIT;
END //

-- The stored capacity of a name, and the id of its last change.
DROP PROCEDURE IF EXISTS lockcore1_stored //
CREATE PROCEDURE lockcore1_stored(IN n VARBINARY(700))
BEGIN
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    SELECT MAX(x.capacity) AS capacity, MAX(x.change_id) AS `change` FROM lockcore1_names AS x WHERE x.name = n;
    COMMIT;
END //

-- Stores a capacity, or takes it back (c is null). The change counts if `after_id` is the last change so far.
--
-- i the id of the change   stated: the capacity that tickets may have: the oldest, if none is stored; all, if it is taken back
-- in_use: the capacity of a ticket that forbids the change   capacity, change: as they are stored now
DROP PROCEDURE IF EXISTS lockcore1_resize //
CREATE PROCEDURE lockcore1_resize(IN i BINARY(16), IN n VARBINARY(700), IN c INT, IN after_id BINARY(16), IN stated INT)
BEGIN
    DECLARE moment, highest, held, soonest, waiter, oldest_place BIGINT;
    DECLARE cap, oldest, other INT;
    DECLARE latest BINARY(16);
    DECLARE barred BOOLEAN;
    DECLARE told MEDIUMTEXT DEFAULT '';
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL lockcore1_take(n, TRUE, moment, highest, cap);
    CALL lockcore1_walk(n, moment, cap, NULL, TRUE, highest, held, soonest, waiter, oldest, oldest_place, told, barred);
    SELECT x.change_id INTO latest FROM lockcore1_names AS x WHERE x.name = n;
    IF NOT latest <=> i AND latest <=> after_id THEN
        IF cap IS NULL THEN
            SET other = NULLIF(oldest, stated);
        ELSEIF c IS NULL THEN
            SELECT t.capacity INTO other FROM lockcore1_tickets AS t
                WHERE t.name = n AND t.expires_at > moment AND t.capacity <> stated ORDER BY t.ticket LIMIT 1;
        END IF;
        IF other IS NULL THEN
            UPDATE lockcore1_names SET capacity = c, change_id = i, changed = moment WHERE name = n;
            SET cap = c, latest = i;
            CALL lockcore1_walk(n, moment, cap, NULL, TRUE, highest, held, soonest, waiter, oldest, oldest_place,
                told, barred);
        END IF;
    ELSEIF latest <=> i THEN
        -- An earlier attempt has made the change. A transaction that writes nothing would not wait until that is on the disk.
        UPDATE lockcore1_names SET changed = moment WHERE name = n;
    END IF;
    COMMIT;
    SELECT other AS in_use, cap AS capacity, latest AS `change`, told;
END //

-- Forgets everything about a name that is not in use. The id of the last change of its capacity stays for a day, so that a
-- repetition of this change does nothing.
DROP PROCEDURE IF EXISTS lockcore1_forget //
CREATE PROCEDURE lockcore1_forget(IN n VARBINARY(700))
BEGIN
    DECLARE moment, highest, youngest BIGINT;
    DECLARE cap INT;
    DECLARE lives BOOLEAN;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL lockcore1_take(n, TRUE, moment, highest, cap);
    SELECT EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n AND t.expires_at > moment) INTO lives;
    IF NOT lives THEN
        SELECT MAX(t.ticket) INTO youngest FROM lockcore1_tickets AS t WHERE t.name = n;
        IF youngest IS NOT NULL THEN
            CALL lockcore1_went(n, youngest, highest);
            DELETE FROM lockcore1_tickets WHERE name = n;
        END IF;
        DELETE FROM lockcore1_names WHERE name = n AND change_id IS NULL;
        UPDATE lockcore1_names SET capacity = NULL, changed = moment WHERE name = n;
    END IF;
    COMMIT;
END //

-- Reads a counter. `now` in s and `clock` in microseconds, both by the server's clock.
DROP PROCEDURE IF EXISTS lockcore1_counter //
CREATE PROCEDURE lockcore1_counter(IN n VARBINARY(700))
BEGIN
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION READ ONLY;
    SELECT c.data, c.used, c.life, moment DIV 1000000 AS now, moment AS clock
    FROM (SELECT 1 AS one) AS o LEFT JOIN lockcore1_counters AS c ON c.name = n;
    COMMIT;
END //

-- Writes a counter if its data is still `was` (null: no row).
DROP PROCEDURE IF EXISTS lockcore1_set_counter //
CREATE PROCEDURE lockcore1_set_counter(IN n VARBINARY(700), IN new_data MEDIUMBLOB, IN was MEDIUMBLOB, IN stays BIGINT)
BEGIN
    DECLARE written BOOLEAN DEFAULT FALSE;
    DECLARE seconds BIGINT DEFAULT TIMESTAMPDIFF(SECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    IF @@GLOBAL.read_only THEN
        SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'this server is read-only, and takes no locks';
    END IF;
    IF was IS NULL THEN
        BEGIN
            DECLARE EXIT HANDLER FOR 1062 BEGIN END; -- another client has made the row
            INSERT INTO lockcore1_counters VALUES (n, new_data, seconds, stays);
            SET written = TRUE;
        END;
    ELSE
        SELECT TRUE INTO written FROM lockcore1_counters AS c WHERE c.name = n AND c.data = was FOR UPDATE;
        IF written THEN
            UPDATE lockcore1_counters SET data = new_data, used = seconds, life = stays WHERE name = n;
        END IF;
    END IF;
    COMMIT;
    SELECT written;
END //

-- One step of the sweep, which removes what nobody has used for long. A step looks at the next 200 names, locks at most 100
-- of them, and waits for none. `last` is where the next step begins; null after the last one. Nothing is granted by this: no
-- ticket is removed from a line with a live ticket.
DROP PROCEDURE IF EXISTS lockcore1_sweep //
CREATE PROCEDURE lockcore1_sweep(IN after_name VARBINARY(700))
BEGIN
    DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6));
    DECLARE minute_ago, day_ago, youngest, highest, ends, many, free BIGINT;
    DECLARE steps, locked INT DEFAULT 0;
    DECLARE n, at VARBINARY(700) DEFAULT after_name;
    DECLARE mine, is_old BOOLEAN;
    DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET minute_ago = moment - 60000000, day_ago = moment - 86400000000;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    WHILE steps < 200 AND locked < 100 AND n IS NOT NULL DO
        SET at = n, n = NULL, steps = steps + 1;
        SELECT x.name INTO n FROM lockcore1_names AS x WHERE x.name > at ORDER BY x.name LIMIT 1;
        SELECT NOT EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n AND t.expires_at > minute_ago)
            AND (EXISTS (SELECT 1 FROM lockcore1_tickets AS t WHERE t.name = n)
                 OR EXISTS (SELECT 1 FROM lockcore1_names AS x
                            WHERE x.name = n AND x.capacity IS NULL AND x.last < day_ago AND x.changed < day_ago)) INTO is_old;
        IF is_old THEN
            SET mine = FALSE;
            SELECT TRUE, x.last INTO mine, highest FROM lockcore1_names AS x WHERE x.name = n FOR UPDATE SKIP LOCKED;
            IF mine THEN
                SET locked = locked + 1;
                -- Now that nobody else changes the name, all is read again.
                SELECT MAX(t.ticket), MAX(t.expires_at), COUNT(*) INTO youngest, ends, many
                    FROM lockcore1_tickets AS t WHERE t.name = n;
                IF ends <= minute_ago THEN
                    -- If somebody else has locked one of the tickets, all stay until the next round.
                    SELECT COUNT(*) INTO free FROM lockcore1_tickets AS t WHERE t.name = n FOR UPDATE SKIP LOCKED;
                    IF free = many THEN
                        CALL lockcore1_went(n, youngest, highest);
                        DELETE FROM lockcore1_tickets WHERE name = n;
                        SET many = 0;
                    END IF;
                END IF;
                IF many = 0 THEN
                    DELETE FROM lockcore1_names WHERE name = n AND capacity IS NULL AND last < day_ago AND changed < day_ago;
                END IF;
            END IF;
        END IF;
    END WHILE;
    COMMIT;
    -- These read the whole table, so they come once, behind the last name. They wait for rows that verbs have locked, so no name
    -- stays locked meanwhile.
    IF n IS NULL THEN
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
        START TRANSACTION;
        DELETE FROM lockcore1_marks WHERE expires_at <= moment;
        COMMIT;
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
        START TRANSACTION;
        DELETE FROM lockcore1_counters WHERE used + life < moment DIV 1000000;
        COMMIT;
    END IF;
    SELECT n AS last;
END //

-- The verbs of version 1 called this one.
DROP PROCEDURE IF EXISTS lockcore1_settle //

-- The version of this text. It changes with every change of a procedure. When it is there, all are.
CREATE PROCEDURE lockcore1_version() SELECT 3 AS version //

DO RELEASE_LOCK(CONCAT('lockcore1 ', MD5(DATABASE()))) //

DELIMITER ;
