-- Begins an epoch in a file from which the tickets, the marks and the earlier epoch were removed.
--
-- ?1 epoch   ?2 id of the boot   ?3 ms of the wall clock at boot   ?4 now in s of the boot clock
-- Part of the transaction that opens the file.

INSERT INTO store (epoch, boot, booted_at, ahead)
SELECT ?1, ?2, ?3, max(
    coalesce((SELECT max(used) FROM counters), 0),
    coalesce((SELECT max(changed) FROM capacities), 0)
) - ?4;
