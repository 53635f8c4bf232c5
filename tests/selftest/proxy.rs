//! Tests of the proxy in front of a real Redis server.

use std::time::Duration;

use libtest_mimic::Trial;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;

use crate::facts;

pub(crate) fn facts() -> Vec<Trial> {
    facts![RedisServer::available();
        redis_is_reached_through_the_proxy
        a_script_whose_reply_is_lost_has_run
        a_cut_connection_fails_and_a_new_one_works_after_the_restore
        a_proxy_outlives_a_restart_of_its_server
    ]
}

fn connect(proxy: &Proxy) -> redis::RedisResult<redis::Connection> {
    redis::Client::open(proxy.url())?.get_connection_with_timeout(Duration::from_secs(10))
}

fn redis_is_reached_through_the_proxy() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());

    redis::cmd("SET")
        .arg("a")
        .arg("1")
        .exec(&mut connect(&proxy).unwrap())
        .unwrap();

    assert_eq!(server.keys("*"), ["a"]);
    assert_eq!(proxy.traffic().connections, 1);
}

fn a_script_whose_reply_is_lost_has_run() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let script =
        server.command::<String>(&["SCRIPT", "LOAD", "return redis.call('INCR', KEYS[1])"]);
    let mut connection = connect(&proxy).unwrap();
    let mut incr = redis::cmd("EVALSHA");
    incr.arg(&script).arg(1).arg("n");

    proxy.lose_replies(b"EVALSHA", 1);
    let lost = incr.query::<u64>(&mut connection);
    let again = incr.query::<u64>(&mut connect(&proxy).unwrap());

    assert!(lost.is_err());
    assert_eq!(again.unwrap(), 2);
    assert_eq!(proxy.traffic().replies_lost, 1);
}

fn a_cut_connection_fails_and_a_new_one_works_after_the_restore() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let mut connection = connect(&proxy).unwrap();

    proxy.cut();
    assert!(redis::cmd("PING").exec(&mut connection).is_err());
    let refused =
        connect(&proxy).and_then(|mut connection| redis::cmd("PING").exec(&mut connection));
    assert!(refused.is_err());
    proxy.restore();

    redis::cmd("PING")
        .exec(&mut connect(&proxy).unwrap())
        .unwrap();
}

fn a_proxy_outlives_a_restart_of_its_server() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let mut connection = connect(&proxy).unwrap();

    server.kill();
    assert!(redis::cmd("PING").exec(&mut connection).is_err());
    server.restart();

    redis::cmd("PING")
        .exec(&mut connect(&proxy).unwrap())
        .unwrap();
}
