//! Tests of the Redis servers with sentinels that the harness starts.

use std::time::Duration;

use libtest_mimic::Trial;
use tests::eventually::wait_until;
use tests::redis_sentinels::{NEVER, Sentinels};
use tests::redis_server::RedisServer;

pub(crate) fn facts() -> Vec<Trial> {
    crate::facts![RedisServer::available();
        a_failover_that_is_asked_for_makes_a_replica_the_master
        a_master_that_is_killed_is_replaced_and_comes_back_as_a_replica
        a_hidden_master_is_replaced_and_goes_on
        writes_after_replication_was_stopped_reach_no_replica
    ]
}

const DOWN_AFTER: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);

fn is(role: &str, server: &RedisServer) -> bool {
    // This command may fail once, because a sentinel that makes a server a replica closes the
    // connections of this server.
    let told = server.try_command::<String>(&["INFO", "replication"]);
    told.is_ok_and(|told| told.contains(&format!("role:{role}")))
}

fn a_failover_that_is_asked_for_makes_a_replica_the_master() {
    let set = Sentinels::start(NEVER);
    let old = set.master();
    set.wait_until_replicated();

    set.fail_over();

    assert_ne!(set.master().port(), old.port());
    assert!(is("master", set.master()));
    wait_until("the old one follows", PATIENCE, || is("slave", old));
}

fn a_master_that_is_killed_is_replaced_and_comes_back_as_a_replica() {
    let set = Sentinels::start(DOWN_AFTER);
    let old = set.master();
    old.command::<()>(&["SET", "a", "1"]);
    set.wait_until_replicated();

    old.kill();
    set.wait_for_another_master_than(old.port());
    old.restart();
    set.wait_until_complete();

    assert!(is("slave", old));
    let kept: String = set.master().command(&["GET", "a"]);
    assert_eq!(kept, "1");
}

fn a_hidden_master_is_replaced_and_goes_on() {
    let set = Sentinels::start(DOWN_AFTER);
    let old = set.master();

    set.hide_the_master();
    set.wait_for_another_master_than(old.port());

    assert!(is("master", old) && is("master", set.master()));
    old.command::<()>(&["SET", "a", "1"]);
    set.show(old);
    wait_until("it is demoted", PATIENCE, || is("slave", old));
}

fn writes_after_replication_was_stopped_reach_no_replica() {
    let set = Sentinels::start(NEVER);
    let master = set.master();
    master.command::<()>(&["SET", "before", "1"]);
    set.wait_until_replicated();

    set.stop_replication();
    master.command::<()>(&["SET", "after", "1"]);
    let reached: u64 = master.command(&["WAIT", "1", "500"]);

    assert_eq!(reached, 0);
    for server in &set.servers[1..] {
        let found: (u64, u64) = (
            server.command(&["EXISTS", "before"]),
            server.command(&["EXISTS", "after"]),
        );
        assert_eq!(found, (1, 0));
    }
}
