-- Lets a token pass a fence, and raises the fence to it. For PostgreSQL and SQLite.
--
-- Arguments: $1 resource, $2 token (BIGINT). Rows affected: 1, passed; 0, refused: a higher token was here.
--
-- Runs first in the transaction of the write. The row stays locked until that ends, so a write under another token comes
-- wholly before or wholly after it. Where nothing is written before, its refusal undoes nothing.
INSERT INTO lockcore_fences (resource, highest) VALUES ($1, $2)
ON CONFLICT (resource) DO UPDATE SET highest = excluded.highest
WHERE lockcore_fences.highest <= excluded.highest
