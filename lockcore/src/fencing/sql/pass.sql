-- Lets a token pass a fence, and raises the fence to it. For PostgreSQL and SQLite.
--
-- Arguments: $1 resource, $2 token (BIGINT). Rows affected: 1 if the token has passed; 0 if it is
-- refused, because a higher token has passed before.
--
-- Runs first in the transaction of the write. The row stays locked until that transaction ends. So
-- a write under another token comes wholly before or wholly after it. Because nothing is written
-- before this statement, a refusal has nothing to undo.
INSERT INTO lockcore_fences (resource, highest) VALUES ($1, $2)
ON CONFLICT (resource) DO UPDATE SET highest = excluded.highest
WHERE lockcore_fences.highest <= excluded.highest
