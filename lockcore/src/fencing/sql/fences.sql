-- The highest token that has written to each resource. For writes that have no row of their own for
-- the token.
--
-- Keep the row of a resource for as long as a late write to it is possible. Always protect a
-- resource with the same lock.
CREATE TABLE IF NOT EXISTS lockcore_fences (
    resource  TEXT   NOT NULL PRIMARY KEY,
    highest   BIGINT NOT NULL -- the highest token that has passed
)
