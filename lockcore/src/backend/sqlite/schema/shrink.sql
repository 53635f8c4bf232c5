-- Which of the tickets that are asked for are to keep fewer permits than they have.
--
-- ?7 JSON object: by id, the permits of those who ask for less than all of them. Others cannot have more.

INSERT INTO shrinks
SELECT asked.id, wanted.value
FROM json_each(?7) AS wanted JOIN asked ON asked.id = wanted.key JOIN tickets ON tickets.id = asked.id
WHERE wanted.value < tickets.permits
ON CONFLICT (id) DO UPDATE SET permits = min(permits, excluded.permits);

