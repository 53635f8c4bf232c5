-- Stores a capacity, and reports the tickets that hold because of it. Runs after `ask_resize.sql`,
-- whose arguments it uses, and `line.sql`.
--
-- Rows, none if the epoch is over: the rows of the view `told`, and one row of kind 0. It has what
-- is stored now, its last change, and the capacity of a ticket that forbids the change.

INSERT INTO capacities (name, capacity, through, change, changed)
SELECT key, capacity, coalesce((SELECT max(ticket) FROM line WHERE was <= limit_was), 0), id, now / 1000 + ahead
FROM asked, store WHERE resizes
ON CONFLICT (name) DO UPDATE
SET capacity = excluded.capacity, through = max(through, excluded.through),
    change = excluded.change, changed = excluded.changed;

SELECT 0 AS kind, asked.id AS id, 0 AS ticket, 0 AS receiver, NULL AS soonest,
       capacities.capacity AS capacity, capacities.change AS change, asked.permits AS in_use
FROM asked LEFT JOIN capacities ON capacities.name = asked.key
UNION ALL
SELECT kind, id, ticket, receiver, soonest, NULL, NULL, NULL FROM told;

COMMIT;
