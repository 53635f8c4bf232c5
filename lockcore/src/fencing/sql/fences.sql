-- The highest token that has written to each resource, for writes that have no row of their own to keep it in.
--
-- A row stays as long as anybody could still write late. Its resource is always protected by the same lock.
CREATE TABLE IF NOT EXISTS lockcore_fences (
    resource  TEXT   NOT NULL PRIMARY KEY,
    highest   BIGINT NOT NULL -- of the tokens that have passed
)
