//! Tests of the Redis server that the harness starts: its ports, its users, its faults and its
//! clock.

use std::time::{Duration, SystemTime};

use libtest_mimic::Trial;
use tests::eventually::wait_until;
use tests::faketime::{Clock, FakeClock};
use tests::redis_server::RedisServer;

use crate::facts;

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn facts() -> Vec<Trial> {
    let mut facts = facts![RedisServer::available();
        a_server_answers_at_its_url
        two_servers_share_nothing
        arguments_outrank_the_harness
        a_user_with_an_awkward_password_gets_in_by_url
        the_harness_gets_in_where_nobody_else_does
        a_killed_server_comes_back_empty_on_the_same_port
        a_stopped_server_comes_back_with_its_saved_data
        a_restart_changes_the_process_and_not_the_port
        a_frozen_server_answers_after_the_thaw
        a_dropped_server_is_gone_with_its_folder_even_frozen
        a_server_that_cannot_start_says_why
        a_taken_port_is_recognised_and_another_tried
        a_restart_waits_until_its_port_is_free
        commands_are_counted
        a_server_dies_with_a_test_process_that_is_killed
    ];
    facts.extend(facts![RedisServer::available().and(FakeClock::available());
        the_clock_jumps_ahead_and_back
        a_lock_expires_early_when_the_clock_jumps_ahead
        a_restarted_server_keeps_its_clock
    ]);
    facts
}

fn get(url: &str, key: &str) -> redis::RedisResult<Option<String>> {
    redis::cmd("GET")
        .arg(key)
        .query(&mut redis::Client::open(url)?.get_connection_with_timeout(SOON)?)
}

fn a_server_answers_at_its_url() {
    let server = RedisServer::start();

    server.command::<()>(&["SET", "a", "1"]);

    assert_eq!(get(&server.url(), "a").unwrap().as_deref(), Some("1"));
    assert_ne!(server.port(), 6379);
}

fn two_servers_share_nothing() {
    let (one, other) = (RedisServer::start(), RedisServer::start());

    one.command::<()>(&["SET", "a", "1"]);

    assert_eq!(one.keys("*"), ["a"]);
    assert_eq!(other.keys("*"), Vec::<String>::new());
    one.flush();
    assert_eq!(one.keys("*"), Vec::<String>::new());
}

fn arguments_outrank_the_harness() {
    let server = RedisServer::with(&["--appendonly", "yes", "--maxmemory", "100mb"]);

    assert_eq!(
        server.command::<Vec<String>>(&["CONFIG", "GET", "appendonly"])[1],
        "yes"
    );
    assert_eq!(
        server.command::<Vec<String>>(&["CONFIG", "GET", "maxmemory"])[1],
        "104857600"
    );
}

fn a_user_with_an_awkward_password_gets_in_by_url() {
    let server = RedisServer::start();
    let password = "p@ss:/?#%&word";

    server.command::<()>(&[
        "ACL",
        "SETUSER",
        "app",
        "on",
        &format!(">{password}"),
        "~*",
        "+@all",
    ]);

    assert_eq!(
        get(&server.url_with_user("app", password), "a").unwrap(),
        None
    );
    assert!(get(&server.url_with_user("app", "wrong"), "a").is_err());
}

fn the_harness_gets_in_where_nobody_else_does() {
    let server = RedisServer::with(&["--requirepass", "secret"]);

    server.command::<()>(&["PING"]);
    assert!(get(&server.url(), "a").is_err());
    assert_eq!(
        get(&server.url_with_user("default", "secret"), "a").unwrap(),
        None
    );

    server.restart();
    server.command::<()>(&["ACL", "SETUSER", "default", "off"]);
    server.command::<()>(&["PING"]);
}

fn a_killed_server_comes_back_empty_on_the_same_port() {
    let server = RedisServer::start();
    let url = server.url();
    server.command::<()>(&["SET", "a", "1"]);

    server.kill();
    assert!(get(&url, "a").is_err());
    server.restart();

    assert_eq!(get(&url, "a").unwrap(), None);
}

fn a_stopped_server_comes_back_with_its_saved_data() {
    let server = RedisServer::with(&["--appendonly", "yes"]);
    server.command::<()>(&["SET", "a", "1"]);

    server.stop();
    assert!(get(&server.url(), "a").is_err());
    server.restart();

    assert_eq!(get(&server.url(), "a").unwrap().as_deref(), Some("1"));
}

fn a_restart_changes_the_process_and_not_the_port() {
    let server = RedisServer::start();
    let (pid, port) = (server.pid(), server.port());

    server.restart();

    assert_ne!(server.pid(), pid);
    assert_eq!(server.port(), port);
}

fn a_frozen_server_answers_after_the_thaw() {
    let server = RedisServer::start();
    let mut connection = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    connection
        .set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();

    server.freeze();
    assert!(redis::cmd("PING").query::<String>(&mut connection).is_err());
    server.thaw();

    server.command::<()>(&["PING"]);
}

fn a_dropped_server_is_gone_with_its_folder_even_frozen() {
    let server = RedisServer::start();
    let folder = server.command::<Vec<String>>(&["CONFIG", "GET", "dir"])[1].clone();
    let pid = server.pid();
    server.freeze();

    drop(server);

    assert!(!std::fs::exists(folder).unwrap());
    assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap());
}

fn a_server_that_cannot_start_says_why() {
    let panic =
        std::panic::catch_unwind(|| RedisServer::with(&["--no-such-option", "1"])).unwrap_err();

    let message = panic.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("no-such-option") && message.contains("Bad directive"),
        "{message}"
    );
}

fn a_taken_port_is_recognised_and_another_tried() {
    let taken = tests::ports::listen();
    let port = taken.local_addr().unwrap().port().to_string();

    // This argument overrides every port that the harness chooses.
    let panic = std::panic::catch_unwind(|| RedisServer::with(&["--port", &port])).unwrap_err();

    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("5 free ports were taken"), "{message}");
}

fn a_restart_waits_until_its_port_is_free() {
    let server = RedisServer::start();
    server.kill();
    let squatter = std::net::TcpListener::bind(("127.0.0.1", server.port())).unwrap();

    std::thread::scope(|scope| {
        scope.spawn(|| server.restart());
        wait_until("a start has failed", SOON, || {
            server.log_tail().contains("Address already in use")
        });
        drop(squatter);
    });

    assert_eq!(get(&server.url(), "a").unwrap(), None);
}

fn commands_are_counted() {
    let server = RedisServer::start();
    let before = server.command_stats();

    for _ in 0..3 {
        get(&server.url(), "a").unwrap();
    }
    server.command::<()>(&["EVAL", "redis.call('SET', 'a', '1')", "0"]);

    let since = server.command_stats_since(&before);
    assert_eq!(
        (since["get"], since["eval"], since["set"]),
        (3, 1, 1),
        "{since:?}"
    );
    assert!(!since.contains_key("info"));
}

/// If this variable is set, this program is the test process that is killed.
const DOOMED: &str = "LOCKCORE_HARNESS_DOOMED";

fn a_server_dies_with_a_test_process_that_is_killed() {
    use std::process::Command;
    use tests::process::Process;

    if std::env::var_os(DOOMED).is_some() {
        let server = RedisServer::start();
        let folder = server.command::<Vec<String>>(&["CONFIG", "GET", "dir"])[1].clone();
        // The text begins a new line, because libtest-mimic captures no output, and has already
        // begun a line.
        println!(
            "
SERVER {} {folder}",
            server.pid()
        );
        loop {
            std::thread::park();
        }
    }

    let mut doomed = Process::start(
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "redis_server::a_server_dies_with_a_test_process_that_is_killed",
            ])
            .env(DOOMED, "1"),
    );
    let server = std::iter::from_fn(|| doomed.hear(SOON))
        .find_map(|line| Some(line.strip_prefix("SERVER ")?.to_owned()));
    let server = server.unwrap();
    let (pid, folder) = server.split_once(' ').unwrap();

    doomed.kill();

    // The server is gone when init has reaped it. Where init does not reap, it is a zombie, which
    // serves nobody either.
    wait_until("the server is gone", SOON, || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .map_or(true, |stat| stat.contains(") Z "))
    });
    wait_until("its folder is gone", SOON, || {
        !std::fs::exists(folder).unwrap()
    });
}

/// How many seconds the server's clock is ahead of this process's clock.
fn ahead(server: &RedisServer) -> i64 {
    let theirs = server.command::<Vec<String>>(&["TIME"])[0]
        .parse::<i64>()
        .unwrap();
    let ours = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    theirs - i64::try_from(ours).unwrap()
}

const JUMP: Duration = Duration::from_secs(300);

fn the_clock_jumps_ahead_and_back() {
    let server = RedisServer::with_clock(&[]);
    assert!(ahead(&server).abs() <= 1);

    server.set_clock(Clock::Ahead(JUMP));
    assert!((299..=301).contains(&ahead(&server)), "{}", ahead(&server));

    server.set_clock(Clock::Behind(JUMP));
    assert!(
        (-301..=-299).contains(&ahead(&server)),
        "{}",
        ahead(&server)
    );

    server.set_clock(Clock::True);
    assert!(ahead(&server).abs() <= 1);
}

fn a_lock_expires_early_when_the_clock_jumps_ahead() {
    let server = RedisServer::with_clock(&[]);
    server.command::<()>(&["SET", "lock", "a", "PX", "60000"]);

    server.set_clock(Clock::Ahead(JUMP));

    let script =
        "local t = redis.call('TIME') return {redis.call('EXISTS', 'lock'), tonumber(t[1])}";
    let (exists, seconds): (i64, u64) = server.command(&["EVAL", script, "0"]);
    let ours = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    assert_eq!(exists, 0);
    assert!(seconds >= ours + 298);
}

fn a_restarted_server_keeps_its_clock() {
    let server = RedisServer::with_clock(&[]);
    server.set_clock(Clock::Behind(JUMP));

    server.restart();

    assert!(
        (-301..=-299).contains(&ahead(&server)),
        "{}",
        ahead(&server)
    );
}
