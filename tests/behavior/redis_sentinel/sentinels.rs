//! Tests with sentinels that are down, silent or wrong, or that require a password. Each fact has
//! its own sentinels. The servers that they watch are never replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{Error, ErrorKind, Locks};
use tests::certificates::Authority;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_sentinels::{NEVER, SERVICE, Sentinels, one_that_names, settings, url};
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::redis::{USER, documented_at_sentinel, grant_at_sentinel};
use tests::watch::SECRET;
use tokio::net::TcpListener;
use tracing::Level;

use super::client;
use crate::faults::{a_shutdown_ends_the_first_use, builder};
use crate::moved::{self, Place};
use crate::store::{Kind, SLACK, SOON, STALL, Store, give_back, kind, shows_no_password};
use crate::traces::{self, LOGGED, WRONG};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_sentinel";
        a_sentinel_that_is_down_or_silent_is_not_missed
        without_a_majority_of_sentinels_nobody_gets_in_and_nobody_loses_a_lock
        of_two_sentinels_the_error_blames_the_one_that_is_down
        a_lock_is_kept_when_all_sentinels_die_after_it_was_taken
        sentinels_that_come_back_are_listened_to_again
        a_connection_that_finds_the_master_asks_each_sentinel_once
        an_idle_connection_follows_another_of_its_client_to_a_new_master
        one_sentinel_that_is_wrong_leads_nobody_away
        sentinels_that_disagree_are_not_believed
        a_service_that_no_sentinel_knows_is_a_mistake
        a_sentinel_without_its_password_is_a_mistake_that_says_where_to_write_it
        the_rights_of_the_guide_are_enough_at_a_sentinel_and_each_is_needed
        a_server_that_is_no_sentinel_is_told_apart_and_so_is_a_sentinel_that_is_no_server
        a_master_whose_name_leads_nowhere_is_unavailable_until_it_leads_somewhere
        clients_exclude_each_other_after_the_address_of_the_master_is_moved
        a_risk_of_two_holders_is_reported_once_when_a_client_connects
        each_new_master_is_looked_at_for_a_risk_of_two_holders
        risky_settings_are_reported_when_the_client_gets_ready
        everything_is_encrypted_with_tls_and_each_certificate_is_looked_at
        a_shutdown_during_the_first_use_ends_it_and_leaves_nothing
    ]
}

/// A server, and three sentinels that name it as the master.
fn watched() -> (RedisServer, Vec<RedisServer>) {
    let server = RedisServer::start();
    let sentinels = (0..3).map(|_| one_that_names(server.port()));
    let sentinels = sentinels.collect();
    (server, sentinels)
}

/// The sentinels go on naming the same address.
async fn clients_exclude_each_other_after_the_address_of_the_master_is_moved(_: Store) {
    let (earlier, later) = (RedisServer::start(), RedisServer::start());
    let way = Proxy::to(earlier.port());
    let sentinels: Vec<_> = (0..3).map(|_| one_that_names(way.port())).collect();
    let place = Place {
        url: url(&sentinels),
        ways: vec![way],
        earlier: vec![earlier],
        later: vec![later],
        beside: Box::new(sentinels),
    };
    moved::clients_exclude_each_other_after_the_move(place).await;
}

async fn gets_in(locks: &Locks) {
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// A client whose error names what it has found, also if the machine stalls.
fn patient(url: &str) -> Locks {
    let builder = builder(url).op_timeout(Duration::from_secs(4));
    builder.build().unwrap()
}

async fn refused(locks: &Locks) -> Error {
    let error = locks.mutex("a").acquire().await.unwrap_err();
    shows_no_password(&error);
    error
}

fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// How much later than the refusal of one sentinel the other sentinels answer.
const LATER: Duration = Duration::from_millis(100);

/// A client asks a failed sentinel again at once only if another of its connections has found a new
/// master.
async fn a_connection_that_finds_the_master_asks_each_sentinel_once(_: Store) {
    let (_server, sentinels) = watched();
    let refuses = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // The other sentinels answer later than this one refuses.
    let proxies = sentinels[..2].iter().map(|sentinel| {
        let proxy = Proxy::to(sentinel.port());
        proxy.delay(Duration::ZERO, LATER);
        proxy
    });
    let proxies: Vec<_> = proxies.collect();
    let ports = proxies.iter().map(Proxy::port);
    let ports = ports.chain([refuses.local_addr().unwrap().port()]);
    let hosts: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
    let url = format!("redis+sentinel://{}/{SERVICE}", hosts.join(","));
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let refusing = tokio::spawn(async move {
        while let Ok((socket, _)) = refuses.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            drop(socket);
        }
    });

    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connected = backend::open(&url).unwrap().connect(events).await.unwrap();

    // No event reports that the client does not ask again, so the test waits. The other sentinels
    // have answered by the end of this pause.
    tokio::time::sleep(3 * LATER).await;
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    drop(connected);
    refusing.abort();
}

/// How many clients have subscribed at this sentinel. Sentinel has no command for this, so their
/// connections are counted.
fn listeners(sentinel: &RedisServer) -> usize {
    let clients: String = sentinel.command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    clients.lines().count()
}

async fn a_sentinel_that_is_down_or_silent_is_not_missed(_: Store) {
    let (_server, sentinels) = watched();
    let url = url(&sentinels);
    sentinels[0].kill();
    gets_in(&client(&url)).await;
    sentinels[0].restart();
    sentinels[1].freeze();
    let locks = builder(&url).op_timeout(STALL).build().unwrap();

    let began = Instant::now();
    gets_in(&locks).await;

    // The client does not wait for the frozen sentinel.
    let took = awake_since(began);
    assert!(took < STALL / 2, "{took:?}");
    sentinels[1].thaw();
}

async fn without_a_majority_of_sentinels_nobody_gets_in_and_nobody_loses_a_lock(_: Store) {
    let (server, sentinels) = watched();
    let url = url(&sentinels);
    let ttl = Duration::from_secs(6);
    let holds = builder(&url).ttl(ttl).op_timeout(SOON).build().unwrap();
    let guard = holds.mutex("held").acquire().await.unwrap();
    let before = Instant::now() + guard.remaining();
    eventually("the keeper is connected", SOON, async || {
        Instant::now() + guard.remaining() > before + SLACK / 5
    })
    .await;
    let hello = |server: &RedisServer| server.command_stats().get("hello").copied();
    let connected = hello(&server);

    for sentinel in &sentinels[..2] {
        sentinel.kill();
    }
    let others = patient(&url);
    let began = Instant::now();
    let error = refused(&others).await;
    let took = awake_since(began);

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    // The error comes after the operation timeout, and not only when the wait is over.
    assert!(took < SOON, "{took:?}: {error}");
    says(
        &error,
        &["of 3 sentinels, 2 must name the same server", "refused"],
    );
    for sentinel in &sentinels[..2] {
        says(&error, &[&sentinel.port().to_string()]);
    }
    // The holder keeps its connections, and its lease is renewed again and again.
    tokio::time::timeout(Duration::from_secs(8), guard.lost())
        .await
        .expect_err("lost with the sentinels");
    gets_in(&holds).await;
    give_back(guard).await;
    assert_eq!(hello(&server), connected);
    sentinels[0].restart();
    gets_in(&others).await;
}

/// The sentinel that is up answers after the other has refused. Its answer could not change the
/// result, so nobody waits for it, and the error does not blame it.
async fn of_two_sentinels_the_error_blames_the_one_that_is_down(_: Store) {
    let (_server, sentinels) = watched();
    let up = Proxy::to(sentinels[0].port());
    up.delay(Duration::ZERO, SOON);
    let down = sentinels[1].port();
    sentinels[1].kill();
    let url = format!(
        "redis+sentinel://127.0.0.1:{},127.0.0.1:{down}/{SERVICE}",
        up.port()
    );

    let error = refused(&patient(&url)).await;

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let blamed =
        format!("(cannot connect to the sentinel 127.0.0.1:{down}: Redis: Connection refused");
    let other = format!("; 127.0.0.1:{} was not waited for)", up.port());
    says(&error, &[&blamed, &other]);
}

/// The keeper finds no master any more, so it has no connection of its own.
async fn a_lock_is_kept_when_all_sentinels_die_after_it_was_taken(_: Store) {
    let (_server, sentinels) = watched();
    let locks = builder(url(&sentinels)).ttl(Duration::from_secs(6));
    let locks = locks.op_timeout(SOON).build().unwrap();
    let guard = locks.mutex("held").acquire().await.unwrap();

    sentinels.iter().for_each(RedisServer::kill);

    tokio::time::timeout(Duration::from_secs(8), guard.lost())
        .await
        .expect_err("lost with the sentinels");
    give_back(guard).await;
    let error = locks.ready(SOON / 2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    says(&error, &["of 3 sentinels, 2 must name the same server"]);
}

/// After the restart, the client asks the sentinels again. So it learns what the sentinels have
/// published meanwhile.
async fn sentinels_that_come_back_are_listened_to_again(_: Store) {
    let (server, sentinels) = watched();
    let locks = client(&url(&sentinels));
    gets_in(&locks).await;
    for sentinel in &sentinels {
        assert!(listeners(sentinel) > 0);
        sentinel.kill();
    }
    // All sentinels are down during these requests.
    for _ in 0..20 {
        gets_in(&locks).await;
    }
    let elsewhere = RedisServer::start();
    for sentinel in &sentinels {
        sentinel.restart();
    }
    eventually("they are listened to", SOON, async || {
        gets_in(&locks).await;
        sentinels.iter().all(|sentinel| listeners(sentinel) > 0)
    })
    .await;

    // Two sentinels name another server after their restart. They are a majority, so the client
    // connects to this server.
    for sentinel in &sentinels[..2] {
        name(sentinel, &elsewhere);
        sentinel.stop();
        sentinel.restart();
    }
    eventually("the client is at the other server", SOON, async || {
        // If the client closes a connection while a request is in flight on it, this request gets
        // no answer.
        if let Ok(guard) = locks.mutex("a").acquire().await {
            let _ = guard.release().await;
        }
        elsewhere.command_stats().contains_key("evalsha")
    })
    .await;
    drop(server);
}

/// The connection of this runtime sends no requests while the sentinels restart, so it does not
/// subscribe again. But the keeper's connection renews a lease, so it asks the sentinels, and finds
/// the new master.
async fn an_idle_connection_follows_another_of_its_client_to_a_new_master(_: Store) {
    let (server, sentinels) = watched();
    let elsewhere = RedisServer::start();
    let builder = builder(url(&sentinels)).op_timeout(STALL);
    let locks = builder.ttl(Duration::from_secs(3)).build().unwrap();
    let held = locks.mutex("held").acquire().await.unwrap();
    eventually("the keeper is connected too", SOON, async || {
        clients(&server) == 2
    })
    .await;

    for sentinel in &sentinels {
        name(sentinel, &elsewhere);
        sentinel.kill();
    }
    for sentinel in &sentinels {
        sentinel.restart();
    }

    eventually("both connections have left", SOON, async || {
        clients(&server) == 0
    })
    .await;
    drop(held);
}

/// How many connections of lockcore clients this server has. The connections of the sentinels and
/// of the harness use the older protocol, so they are not counted.
fn clients(server: &RedisServer) -> usize {
    let clients: String = server.command(&["CLIENT", "LIST"]);
    clients
        .lines()
        .filter(|client| client.contains("resp=3"))
        .count()
}

/// Makes a sentinel name this server, now and after its next start.
fn name(sentinel: &RedisServer, server: &RedisServer) {
    let port = server.port().to_string();
    sentinel.command::<()>(&["SENTINEL", "REMOVE", SERVICE]);
    sentinel.command::<()>(&["SENTINEL", "MONITOR", SERVICE, "127.0.0.1", &port, "1"]);
}

/// The wrong sentinel answers first, and has seen more failovers than the others. It may watch
/// other servers under the same name, so its answer alone does not count.
async fn one_sentinel_that_is_wrong_leads_nobody_away(_: Store) {
    let (server, sentinels) = watched();
    let elsewhere = RedisServer::start();
    let newest = settings(elsewhere.port(), 1, NEVER) + "sentinel config-epoch mymaster 100\n";
    let wrong = RedisServer::sentinel(&newest, &[]);
    let slow = [&sentinels[0], &sentinels[1]].map(|sentinel| Proxy::to(sentinel.port()));
    for proxy in &slow {
        proxy.delay(Duration::from_millis(20), Duration::ZERO);
    }
    for at in 0..3 {
        let mut ports = vec![slow[0].port(), slow[1].port()];
        ports.insert(at, wrong.port());
        let hosts: Vec<_> = (ports.iter().map(|port| format!("127.0.0.1:{port}"))).collect();
        let url = format!("redis+sentinel://{}/{SERVICE}", hosts.join(","));
        gets_in(&client(&url)).await;
    }

    assert!(!elsewhere.command_stats().contains_key("evalsha"));
    assert!(server.command_stats()["evalsha"] >= 6);
}

async fn sentinels_that_disagree_are_not_believed(_: Store) {
    let servers = [(); 3].map(|()| RedisServer::start());
    let sentinels: Vec<_> = (servers.iter().map(|server| one_that_names(server.port()))).collect();
    let locks = patient(&url(&sentinels));

    let error = refused(&locks).await;

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for (sentinel, server) in sentinels.iter().zip(&servers) {
        let names = format!(
            "127.0.0.1:{} names 127.0.0.1:{}",
            sentinel.port(),
            server.port()
        );
        says(&error, &[&names]);
        assert!(!server.command_stats().contains_key("hello"));
    }
}

async fn a_service_that_no_sentinel_knows_is_a_mistake(_: Store) {
    let (_server, sentinels) = watched();
    for (service, hint) in [
        ("mymastr", "did you mean \"mymaster\"?"),
        ("0", "it watches \"mymaster\""),
    ] {
        let url = url(&sentinels).replace(SERVICE, service);

        let error = refused(&client(&url)).await;

        assert_eq!(error.kind(), ErrorKind::Config);
        says(&error, &[&format!("knows no master \"{service}\""), hint]);
    }
}

fn set_password(sentinel: &RedisServer, password: &str) {
    let password = format!(">{password}");
    sentinel.command::<()>(&["ACL", "SETUSER", "default", "resetpass", &password]);
}

async fn a_sentinel_without_its_password_is_a_mistake_that_says_where_to_write_it(_: Store) {
    let (_server, sentinels) = watched();
    for sentinel in &sentinels {
        set_password(sentinel, SECRET);
    }
    // The URL has the password of the servers. The sentinels have the same password, but a client
    // does not send the servers' password to them.
    let url = url(&sentinels).replace("://", &format!("://:{SECRET}@"));
    let locks = |options: &str| {
        let locks = patient(&format!("{url}{options}"));
        assert!(!format!("{locks:?}").contains(SECRET));
        locks
    };
    for options in ["".to_owned(), format!("?sentinel_password={WRONG}")] {
        for outcome in [
            refused(&locks(&options)).await,
            locks(&options).ready(SOON).await.unwrap_err(),
        ] {
            assert_eq!(outcome.kind(), ErrorKind::Config, "{outcome}");
            says(
                &outcome,
                &[
                    "the sentinel 127.0.0.1",
                    "?sentinel_user=USER&sentinel_password=PASSWORD",
                ],
            );
            shows_no_password(&outcome);
        }
    }

    gets_in(&locks(&format!("?sentinel_password={SECRET}"))).await;
    // If the password is wrong at one of three sentinels, the other two are enough.
    set_password(&sentinels[1], "another");
    gets_in(&locks(&format!("?sentinel_password={SECRET}"))).await;
}

async fn the_rights_of_the_guide_are_enough_at_a_sentinel_and_each_is_needed(_: Store) {
    let (server, sentinels) = watched();
    let sentinel = &sentinels[..1];
    grant_at_sentinel(&sentinel[0], SECRET);
    let documented = documented_at_sentinel(SECRET);
    let url = |user: &str| {
        let url = url(sentinel);
        format!("{url}?sentinel_user={user}&sentinel_password={SECRET}")
    };
    gets_in(&client(&url(USER))).await;
    let asks_for_another = url(USER).replace(SERVICE, "mymastr");
    says(
        &refused(&client(&asks_for_another)).await,
        &["did you mean"],
    );

    let rights = documented.iter().cloned();
    let rights: Vec<String> = (rights.filter(|word| word.starts_with(['+', '&']))).collect();
    assert_eq!(rights.len(), 4, "{rights:?}");
    for (number, right) in rights.into_iter().enumerate() {
        let user = format!("user{number}");
        let mut words: Vec<_> = documented.iter().map(String::as_str).collect();
        words[2] = &user;
        words.retain(|word| word != &right.as_str());
        sentinel[0].command::<()>(&words);
        let locks = client(&url(&user));
        if right.contains("masters") {
            // This right is needed only for the hint that is checked below.
            gets_in(&locks).await;
            let locks = client(&url(&user).replace(SERVICE, "mymastr"));
            says(&refused(&locks).await, &["knows no master \"mymastr\""]);
            continue;
        }
        let error = refused(&locks).await;
        assert_eq!(error.kind(), ErrorKind::Config, "without {right}: {error}");
        says(&error, &["the sentinel", "Minimum rights"]);
    }
    drop(server);
}

async fn a_server_that_is_no_sentinel_is_told_apart_and_so_is_a_sentinel_that_is_no_server(
    _: Store,
) {
    let (server, sentinels) = watched();

    let error = refused(&client(&url(std::slice::from_ref(&server)))).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["is not a Redis Sentinel", "write redis://"]);

    let error = refused(&client(&sentinels[0].url())).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["redis+sentinel://host:port/SERVICE"]);
}

/// The setting `announce-hostnames` makes the sentinel answer with a host name.
async fn a_master_whose_name_leads_nowhere_is_unavailable_until_it_leads_somewhere(_: Store) {
    let server = RedisServer::start();
    let names = |host: &str| {
        let monitor = settings(server.port(), 1, NEVER).replace("127.0.0.1", host);
        format!("sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n{monitor}")
    };
    let sentinel = RedisServer::sentinel(&names("gone.invalid"), &[]);
    let locks = patient(&url(std::slice::from_ref(&sentinel)));

    let error = refused(&locks).await;

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    says(&error, &["the master gone.invalid:", "lookup"]);
    let port = server.port().to_string();
    sentinel.command::<()>(&["SENTINEL", "REMOVE", SERVICE]);
    sentinel.command::<()>(&["SENTINEL", "MONITOR", SERVICE, "localhost", &port, "1"]);
    gets_in(&locks).await;
}

/// Nobody calls `ready`.
async fn a_risk_of_two_holders_is_reported_once_when_a_client_connects(_: Store) {
    let set = Sentinels::start(NEVER);
    let risks = |owner: &str| {
        let lines = traces::lines(owner);
        let lines = lines.iter().filter(|line| {
            line.level == Level::WARN && line.text.contains("Set min-replicas-to-write 1")
        });
        lines.count()
    };
    let use_it = async |owner: &str, reported: usize| {
        let locks = builder(set.url()).owner(owner).op_timeout(SOON);
        let locks = locks.build().unwrap();
        gets_in(&locks).await;
        eventually("it is reported", SOON, async || risks(owner) == reported).await;
        // The client has two connections after this.
        locks.ready(SOON).await.unwrap();
        gets_in(&locks).await;
        locks.shutdown(SOON).await.unwrap();
        assert_eq!(risks(owner), reported);
    };

    use_it(&format!("{LOGGED}at-risk"), 1).await;
    let words = ["CONFIG", "SET", "min-replicas-to-write", "1"];
    set.master().command::<()>(&words);
    use_it(&format!("{LOGGED}no-risk"), 0).await;
}

/// The replicas have other settings than the first master.
async fn each_new_master_is_looked_at_for_a_risk_of_two_holders(_: Store) {
    let set = Sentinels::start(NEVER);
    let owner = format!("{LOGGED}moved");
    let risks = || {
        let lines = traces::lines(&owner).into_iter().filter(|line| {
            line.level == Level::WARN && line.text.contains("Set min-replicas-to-write 1")
        });
        lines.map(|line| line.text).collect::<Vec<_>>()
    };
    let want = |replicas: &str| {
        let words = ["CONFIG", "SET", "min-replicas-to-write", replicas];
        set.master().command::<()>(&words);
    };
    want("1");
    let locks = builder(set.url()).owner(&owner).op_timeout(SOON);
    let locks = locks.build().unwrap();
    gets_in(&locks).await;
    locks.ready(SOON).await.unwrap();
    assert_eq!(risks(), [""; 0]);

    set.fail_over();
    gets_in(&locks).await;

    let port = set.master().port();
    eventually("it is reported", SOON, async || !risks().is_empty()).await;
    let told = risks().pop().unwrap();
    assert!(told.contains(&format!("127.0.0.1:{port}: ")), "{told}");
}

async fn risky_settings_are_reported_when_the_client_gets_ready(_: Store) {
    let set = Sentinels::start(NEVER);
    let ready = async |url: String| {
        client(&url).ready(SOON).await.unwrap(); // a warning does not make `ready` fail
        let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
        let connection = backend::open(&url).unwrap().connect(events).await.unwrap();
        connection.check().await.unwrap().join("\n")
    };

    let told = ready(set.url()).await;
    assert!(told.contains("Set min-replicas-to-write 1"), "{told}");
    assert!(
        !told.contains("noeviction") && !told.contains("sentinel is missing"),
        "{told}"
    );

    set.master()
        .command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    set.master()
        .command::<()>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    set.sentinels[2].kill();
    let told = ready(set.url()).await;
    assert!(!told.contains("min-replicas"), "{told}");
    assert!(told.contains("Set maxmemory-policy noeviction"), "{told}");
    let missing = format!(
        "one sentinel is missing: cannot connect to the sentinel 127.0.0.1:{}",
        set.sentinels[2].port()
    );
    assert!(told.contains(&missing), "{told}");

    let told = ready(url(&set.sentinels[..1])).await;
    assert!(told.contains("the URL names 1 of the sentinels"), "{told}");
    let alone = RedisServer::start();
    let names_it = [one_that_names(alone.port())];
    let told = ready(url(&names_it)).await;
    assert!(told.contains("no replica is connected"), "{told}");
}

async fn everything_is_encrypted_with_tls_and_each_certificate_is_looked_at(_: Store) {
    let (ca, here) = (Authority::new(), ["127.0.0.1", "localhost"]);
    let server =
        |hosts: &[&str]| RedisServer::with_tls(&ca.server(hosts), None, &["--requirepass", SECRET]);
    let sentinel = |server: &RedisServer, hosts: &[&str]| {
        let settings = settings(server.port(), 1, NEVER) + &format!("requirepass {SECRET}\n");
        RedisServer::sentinel_with_tls(&ca.server(hosts), &ca, &settings)
    };
    let locks = |port: u16| {
        let url = format!(
            "rediss+sentinel://:{SECRET}@127.0.0.1:{port}/{SERVICE}?sentinel_password={SECRET}"
        );
        let builder = builder(url).op_timeout(SOON / 2).ca_file(ca.file());
        builder.build().unwrap()
    };

    // The client must not send the password in plain text to the sentinel or to the master.
    let sound = server(&here);
    let to_master = Proxy::to(sound.port());
    to_master.lose_replies(SECRET.as_bytes(), 1);
    let names_proxy = RedisServer::sentinel_with_tls(
        &ca.server(&here),
        &ca,
        &(settings(to_master.port(), 1, NEVER) + &format!("requirepass {SECRET}\n")),
    );
    let to_sentinel = Proxy::to(names_proxy.port());
    to_sentinel.lose_replies(SECRET.as_bytes(), 1);
    gets_in(&locks(to_sentinel.port())).await;
    for proxy in [&to_master, &to_sentinel] {
        assert!(proxy.traffic().bytes_up > 500);
        assert_eq!(proxy.traffic().recognised, 0, "the password in plain text");
    }

    let of_another_host = ["elsewhere.example"];
    let wrong_sentinel = sentinel(&sound, &of_another_host);
    let error = refused(&locks(wrong_sentinel.port())).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["the sentinel 127.0.0.1", "is for another host"]);

    let wrong_master = server(&of_another_host);
    let names_it = sentinel(&wrong_master, &here);
    let error = refused(&locks(names_it.port())).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["the master 127.0.0.1", "is for another host"]);

    let plain = RedisServer::start();
    let quick = builder(format!("rediss+sentinel://127.0.0.1:{}/s", plain.port()));
    let quick = quick.ca_file(ca.file()).build().unwrap();
    let outcome = kind(quick.mutex("a").acquire().await);
    assert_eq!(outcome, ErrorKind::Unavailable);
    says(&refused(&quick).await, &["redis+sentinel:// is for them"]);
}

/// The proxies are frozen, so no sentinel answers the question where the master is.
async fn a_shutdown_during_the_first_use_ends_it_and_leaves_nothing(_: Store) {
    let (server, sentinels) = watched();
    let proxies = sentinels.iter().map(|sentinel| Proxy::to(sentinel.port()));
    let proxies: Vec<_> = proxies.collect();
    let ports = proxies.iter().map(Proxy::port);
    let hosts: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
    let url = format!("redis+sentinel://{}/{SERVICE}", hosts.join(","));

    a_shutdown_ends_the_first_use(&url, &proxies).await;

    assert_eq!(server.keys("*"), Vec::<String>::new());
}
