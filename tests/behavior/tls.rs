//! Tests of TLS, for each store that supports it: which certificates the client accepts, and what
//! its errors say.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Builder, Error, ErrorKind, Locks};
use tests::certificates::{Authority, Identity};
use tests::eventually::eventually;
use tests::process::{Holder, HolderOptions};
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::{Schemes, Server, Tls};
use tests::watch::SECRET;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::rustls::crypto::CryptoProvider;

use crate::store::{
    Kind, LEASE, SLACK, SOON, Store, begin, give_back, kind, shows_no_password, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        locks_are_handed_over_and_nothing_goes_out_in_plain_text
        a_connection_that_breaks_is_encrypted_again
        a_server_is_believed_by_its_address_and_by_its_name
        a_certificate_from_another_authority_is_refused
        a_certificate_for_another_host_is_refused
        a_certificate_that_has_expired_is_refused
        a_server_without_tls_is_refused_and_told_nothing
        a_server_of_another_protocol_is_a_mistake
        a_client_without_tls_recognises_a_server_that_wants_it
        a_client_with_a_certificate_gets_in
        a_client_without_the_certificate_that_is_demanded_is_told_so
        a_certificate_that_the_server_refuses_is_named
        a_mistake_is_not_tried_again_unasked
        the_systems_roots_are_trusted_when_no_authority_is_given
        an_authority_of_ones_own_replaces_the_systems_roots
        unusable_files_are_named_when_the_client_is_built
        the_process_is_left_without_a_cryptography_provider
    ]
}

/// An operation timeout that is long enough for an operation that is refused.
const ONE_OPERATION: Duration = Duration::from_secs(3);

const HERE: [&str; 2] = ["127.0.0.1", "localhost"];

fn tls(store: &Store) -> &'static dyn Tls {
    store.kind.tls().expect("a store that has TLS")
}

fn schemes(store: &Store) -> Schemes {
    tls(store).schemes()
}

/// A server that requires a client certificate of this authority, with these versions of TLS.
fn asking(
    store: &Store,
    identity: &Identity,
    clients: Option<&Authority>,
    versions: &[&str],
) -> Box<dyn Server> {
    tls(store).start(identity, clients, versions)
}

fn server_with(store: &Store, identity: &Identity) -> Box<dyn Server> {
    asking(store, identity, None, &["TLSv1.3", "TLSv1.2"])
}

fn server(store: &Store, ca: &Authority) -> Box<dyn Server> {
    server_with(store, &ca.server(&HERE))
}

fn port(server: &dyn Server) -> u16 {
    server.process().expect("a server of one's own").port()
}

fn client(url: &str) -> Builder {
    // On a busy machine, the server may need time for its first TLS connection.
    Locks::builder().url(url).op_timeout(2 * SOON)
}

/// A URL with the password. The password is the first thing that any client sends.
fn url(store: &Store, server: &dyn Server) -> String {
    url_of(store, schemes(store).encrypted, port(server))
}

fn url_of(store: &Store, scheme: &str, port: u16) -> String {
    let database = tls(store).database();
    format!("{scheme}://default:{SECRET}@127.0.0.1:{port}{database}")
}

/// How a server fails a client that uses the scheme for the other kind of server.
fn refusal(store: &Store) -> ErrorKind {
    match schemes(store).says_which {
        true => ErrorKind::Config,
        false => ErrorKind::Unavailable,
    }
}

/// The URL of a proxy in front of the server. The proxy looks for the password.
fn watched(store: &Store, server: &dyn Server) -> (Proxy, String) {
    let proxy = Proxy::to(port(server));
    proxy.lose_replies(SECRET.as_bytes(), 1);
    let url = url_of(store, schemes(store).encrypted, proxy.port());
    (proxy, url)
}

/// Checks that a request fails in time with this kind of error, and that the message has all these
/// parts.
async fn refused(builder: Builder, expected: ErrorKind, told: &[&str]) {
    // A mistake is told at once, and other failures when the operation is over.
    let one_operation = match expected {
        ErrorKind::Config => SOON,
        _ => ONE_OPERATION,
    };
    let locks = builder.op_timeout(one_operation).build().unwrap();
    for waits in [true, false] {
        let began = Instant::now();
        let error = match waits {
            true => locks.mutex("a").wait(3 * SOON).acquire().await.unwrap_err(),
            false => locks.ready(one_operation).await.unwrap_err(),
        };
        let took = awake_since(began);
        assert!(took < one_operation + SLACK, "{took:?}: {error}");
        assert_eq!(error.kind(), expected, "{error}");
        says(&error, told);
    }
}

fn says(error: &Error, told: &[&str]) {
    let text = error.to_string();
    for part in told {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    shows_no_password(&(error, text));
}

async fn locks_are_handed_over_and_nothing_goes_out_in_plain_text(store: Store) {
    let ca = Authority::new();
    let server = server(&store, &ca);
    let (proxy, url) = watched(&store, &*server);
    let connect = || {
        let builder = client(&url).ttl(LEASE).ca_file(ca.file());
        builder.build().unwrap()
    };
    let (one, other) = (connect(), connect());
    one.ready(SOON).await.unwrap();

    let guard = one.mutex("a").acquire().await.unwrap();
    let waiter = begin(other.mutex("a").wait(LEASE).renew(true));
    tickets(&one, "a", 2).await;
    let released = Instant::now();
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;

    // Only a wake-up is this fast: the waiter's renewals are twenty seconds apart.
    let after = awake_since(released);
    assert!(after < SOON, "{after:?}");
    assert!(proxy.traffic().bytes_up > 1_000);
    assert_eq!(proxy.traffic().recognised, 0, "the password in plain text");
}

async fn a_connection_that_breaks_is_encrypted_again(store: Store) {
    let ca = Authority::new();
    let server = server(&store, &ca);
    let (proxy, url) = watched(&store, &*server);
    let builder = client(&url).ttl(LEASE).ca_file(ca.file());
    let locks = builder.build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let before = proxy.traffic().connections;

    proxy.cut();
    proxy.restore();

    eventually("connected again", SOON, async || {
        locks.mutex("b").try_acquire().await.is_ok()
    })
    .await;
    give_back(guard).await;
    assert!(proxy.traffic().connections > before);
    assert_eq!(proxy.traffic().recognised, 0, "the password in plain text");
}

async fn a_server_is_believed_by_its_address_and_by_its_name(store: Store) {
    let ca = Authority::new();
    for host in HERE {
        let server = server_with(&store, &ca.server(&[host]));
        let url = url(&store, &*server).replace("127.0.0.1", host);
        let locks = client(&url).ca_file(ca.file()).build().unwrap();
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }
}

async fn a_certificate_from_another_authority_is_refused(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let server = server(&store, &ca);
    let told = ["is not from the CA in", "LOCK_CA_FILE", "UnknownIssuer"];
    let file = other.file().to_str().unwrap();

    let builder = client(&url(&store, &*server)).ca_file(other.file());
    refused(builder, ErrorKind::Config, &[&told[..], &[file]].concat()).await;
}

async fn a_certificate_for_another_host_is_refused(store: Store) {
    let ca = Authority::new();
    let identity = ca.server(&["elsewhere.example"]);
    let server = server_with(&store, &identity);
    for host in HERE {
        let url = url(&store, &*server).replace("127.0.0.1", host);
        let told = ["is for another host", host, "elsewhere.example"];
        refused(client(&url).ca_file(ca.file()), ErrorKind::Config, &told).await;
    }
}

async fn a_certificate_that_has_expired_is_refused(store: Store) {
    let ca = Authority::new();
    let identity = ca.expired_server(&HERE);
    let server = server_with(&store, &identity);
    let builder = client(&url(&store, &*server)).ca_file(ca.file());
    refused(builder, ErrorKind::Config, &["has expired", "renew it"]).await;
}

async fn a_server_without_tls_is_refused_and_told_nothing(store: Store) {
    let ca = Authority::new();
    let server = tls(&store).start_without();
    let (proxy, url) = watched(&store, &*server);
    let builder = client(&url).ca_file(ca.file());

    let told = [schemes(&store).not_encrypted];
    refused(builder, refusal(&store), &told).await;

    let traffic = proxy.traffic();
    match tls(&store).server_speaks_first() {
        false => assert!(traffic.bytes_up > 0, "it was not even asked"),
        true => assert!(
            traffic.bytes_down > 0 && traffic.bytes_up == 0,
            "{traffic:?}"
        ),
    }
    assert_eq!(proxy.traffic().recognised, 0, "the password in plain text");
    if let Some(server) = server.downcast::<RedisServer>() {
        assert_eq!(server.command_stats().get("hello"), None);
    }
}

/// The port of a server that sends this answer to each client and ignores all requests. It waits
/// for the client to begin, if a server of the store would.
fn says_only(store: &Store, answer: &'static [u8]) -> u16 {
    let waits = !tls(store).server_speaks_first();
    let listener = tests::ports::listen();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let listener = TcpListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            // The client may give up a connection before it has sent anything.
            tokio::spawn(async move {
                if waits && client.read_u8().await.is_err() {
                    return;
                }
                if client.write_all(answer).await.is_err() {
                    return;
                }
                // Reads until the client closes. If the server closed now, it would send a reset,
                // which may overtake the answer.
                while client.read_u8().await.is_ok() {}
            });
        }
    });
    port
}

async fn a_server_of_another_protocol_is_a_mistake(store: Store) {
    const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\r\n";
    const TLS_ALERT: &[u8] = &[21, 3, 3, 0, 2, 2, 40];
    let ca = Authority::new();

    let url = url_of(
        &store,
        schemes(&store).encrypted,
        says_only(&store, NOT_TLS),
    );
    let told = ["does not speak TLS", "the scheme without TLS"];
    refused(client(&url).ca_file(ca.file()), ErrorKind::Config, &told).await;
    let Some(not_understood) = tls(&store).not_understood() else {
        return;
    };
    for answer in [NOT_TLS, TLS_ALERT] {
        let url = url_of(&store, schemes(&store).plain, says_only(&store, answer));
        let told = [not_understood, schemes(&store).not_plain];
        refused(client(&url), ErrorKind::Config, &told).await;
    }
}

/// Most servers reset the connection. A server in trouble may do this too, so the error is not
/// `Config` then.
async fn a_client_without_tls_recognises_a_server_that_wants_it(store: Store) {
    let ca = Authority::new();
    let server = server(&store, &ca);
    let builder = client(&url_of(&store, schemes(&store).plain, port(&*server)));
    let told = [schemes(&store).not_plain];
    refused(builder, refusal(&store), &told).await;
}

async fn a_client_with_a_certificate_gets_in(store: Store) {
    let ca = Authority::new();
    let server = asking(&store, &ca.server(&HERE), Some(&ca), &["TLSv1.3"]);
    let locks = with(
        client(&url(&store, &*server)).ca_file(ca.file()),
        &ca.client(),
    );
    give_back(locks.build().unwrap().mutex("a").acquire().await.unwrap()).await;
}

fn with(builder: Builder, identity: &Identity) -> Builder {
    builder
        .cert_file(&identity.certificate)
        .key_file(&identity.key)
}

async fn a_client_without_the_certificate_that_is_demanded_is_told_so(store: Store) {
    let ca = Authority::new();
    for (version, told) in [
        ("TLSv1.3", "demands a client certificate"),
        ("TLSv1.2", "if it demands a client certificate"),
    ] {
        let server = asking(&store, &ca.server(&HERE), Some(&ca), &[version]);
        let told = [told, "LOCK_CERT_FILE", "LOCK_KEY_FILE"];
        let builder = client(&url(&store, &*server)).ca_file(ca.file());
        refused(builder, ErrorKind::Config, &told).await;
    }
}

async fn a_certificate_that_the_server_refuses_is_named(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    for version in ["TLSv1.3", "TLSv1.2"] {
        let server = asking(&store, &ca.server(&HERE), Some(&ca), &[version]);
        for identity in [other.client(), ca.expired_client()] {
            let file = identity.certificate.to_str().unwrap();
            let told = ["refuses the client certificate", "LOCK_CERT_FILE", file];
            let builder = client(&url(&store, &*server)).ca_file(ca.file());
            refused(with(builder, &identity), ErrorKind::Config, &told).await;
        }
    }
}

async fn a_mistake_is_not_tried_again_unasked(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let server = server(&store, &ca);
    let (proxy, proxied) = watched(&store, &*server);
    let builder = client(&proxied).ca_file(other.file());
    let locks = builder.build().unwrap();
    let opened_by = |tries: u64| {
        let opened = proxy.traffic().connections;
        let at_once = tls(&store).connections_at_once();
        assert!(
            (tries..=tries * at_once).contains(&opened),
            "{opened} by {tries}"
        );
    };
    for tries in 1..=3 {
        assert_eq!(kind(locks.mutex("a").acquire().await), ErrorKind::Config);
        opened_by(tries);
    }

    // This lease is much longer than the longest pause between two tries.
    let sound = client(&url(&store, &*server))
        .ca_file(ca.file())
        .build()
        .unwrap();
    let lock = sound.mutex("b").ttl(Duration::from_secs(4)).renew(false);
    lock.acquire().await.unwrap().lost().await;
    opened_by(3);
}

/// A helper process. Its system trusts the authority `system`.
fn process(url: &str, system: &Authority, own: Option<&Authority>) -> Holder {
    let mut options = HolderOptions::mutex(url, "a");
    let path = |file: &Path| file.to_str().unwrap().to_owned();
    options.variables = vec![("SSL_CERT_FILE".into(), path(system.file()))];
    if let Some(own) = own {
        options
            .variables
            .push(("LOCK_CA_FILE".into(), path(own.file())));
    }
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

async fn the_systems_roots_are_trusted_when_no_authority_is_given(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let server = server(&store, &ca);

    process(&url(&store, &*server), &ca, None)
        .try_acquire()
        .unwrap();

    let refusal = process(&url(&store, &*server), &other, None).try_acquire();
    assert_eq!(refusal.unwrap_err(), "Config");
}

async fn an_authority_of_ones_own_replaces_the_systems_roots(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let server = server(&store, &ca);

    process(&url(&store, &*server), &other, Some(&ca))
        .try_acquire()
        .unwrap();

    let refusal = process(&url(&store, &*server), &ca, Some(&other)).try_acquire();
    assert_eq!(refusal.unwrap_err(), "Config");
}

async fn unusable_files_are_named_when_the_client_is_built(store: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let (identity, stranger) = (ca.client(), other.client());
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::write(&file, text).unwrap();
        file
    };
    let key_text = fs::read_to_string(&identity.key).unwrap();
    let certificate_text = fs::read_to_string(&identity.certificate).unwrap();
    let missing = folder.path().join("missing.pem");
    let empty = file("empty.pem", "");
    let damaged = file(
        "damaged.pem",
        &certificate_text.replace("-----END", "-----AND"),
    );
    let Schemes {
        plain, encrypted, ..
    } = schemes(&store);
    let base = || client(&url_of(&store, encrypted, 1));
    let secret_line = key_text.lines().nth(1).unwrap();

    for (builder, told) in [
        (
            base().ca_file(&missing),
            vec!["LOCK_CA_FILE (ca_file)", "missing.pem", "cannot be read"],
        ),
        (
            base().ca_file(folder.path()),
            vec!["LOCK_CA_FILE (ca_file)", "cannot be read"],
        ),
        (
            base().ca_file(&empty),
            vec!["LOCK_CA_FILE (ca_file)", "empty.pem", "no certificate"],
        ),
        (
            base().ca_file(&identity.key),
            vec!["LOCK_CA_FILE (ca_file)", "key.pem", "no certificate"],
        ),
        (
            base().ca_file(&damaged),
            vec!["LOCK_CA_FILE (ca_file)", "damaged.pem", "not sound PEM"],
        ),
        (
            base().cert_file(&identity.certificate),
            vec!["LOCK_CERT_FILE", "without LOCK_KEY_FILE (key_file)"],
        ),
        (
            base().key_file(&identity.key),
            vec!["LOCK_KEY_FILE", "without LOCK_CERT_FILE (cert_file)"],
        ),
        (
            base().cert_file(&missing).key_file(&identity.key),
            vec!["LOCK_CERT_FILE (cert_file)", "missing.pem"],
        ),
        (
            base().cert_file(&empty).key_file(&identity.key),
            vec!["LOCK_CERT_FILE (cert_file)", "no certificate"],
        ),
        (
            base().cert_file(&identity.certificate).key_file(&missing),
            vec!["LOCK_KEY_FILE (key_file)", "missing.pem"],
        ),
        (
            base().cert_file(&identity.certificate).key_file(&empty),
            vec!["LOCK_KEY_FILE (key_file)", "no private key"],
        ),
        (
            base()
                .cert_file(&identity.certificate)
                .key_file(&stranger.key),
            vec!["LOCK_CERT_FILE", "LOCK_KEY_FILE", "do not go together"],
        ),
        (
            base().cert_file(&identity.certificate).key_file(&key_text),
            vec!["LOCK_KEY_FILE (key_file)", "the path of a PEM file"],
        ),
        (
            client(&format!("{plain}://127.0.0.1")).ca_file(ca.file()),
            vec!["LOCK_CA_FILE (ca_file)", "does not use TLS", encrypted],
        ),
        (
            client("memory:").key_file(&identity.key),
            vec!["LOCK_KEY_FILE (key_file)", "\"memory\" does not use TLS"],
        ),
    ] {
        let shown = format!("{builder:?}");
        let error = builder.build().expect_err(&format!("{told:?}"));
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        says(&error, &told);
        assert!(!shown.contains(secret_line), "{shown}");
        assert!(
            !format!("{error} {error:?}").contains(secret_line),
            "{error}"
        );
    }
    with(base().ca_file(ca.file()), &identity).build().unwrap();
}

/// The application installs its own cryptography provider, or none. If the library had installed
/// one, the process would refuse the application's provider.
async fn the_process_is_left_without_a_cryptography_provider(store: Store) {
    let ca = Authority::new();
    let server = server(&store, &ca);
    let locks = client(&url(&store, &*server))
        .ca_file(ca.file())
        .build()
        .unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    assert!(CryptoProvider::get_default().is_none());
}
