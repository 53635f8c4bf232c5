//! Tests with nodes that clients reach over TLS.

use libtest_mimic::Trial;
use lockcore::{Builder, ErrorKind, Locks};
use tempfile::TempDir;
use tests::certificates::Authority;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_quorum::{KEEPS_ALL, folder};
use tests::redis_server::RedisServer;
use tests::watch::SECRET;

use super::nothing_is_left;
use crate::store::{Kind, SOON, Store, give_back, kind, shows_no_password};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        locks_are_kept_over_tls_and_nothing_goes_out_in_plain_text
        a_node_that_is_not_trusted_does_not_vote
        nodes_without_tls_are_told_nothing
    ]
}

/// A node behind a proxy. The proxy looks for the password, which is the first thing that any
/// client sends.
struct Watched {
    proxy: Proxy,
    node: RedisServer,
    _folder: TempDir,
}

impl Watched {
    /// A node that accepts TLS only, with a certificate of this authority. For `None`, a node
    /// without TLS.
    fn by(authority: Option<&Authority>) -> Self {
        let folder = folder();
        let in_folder = ["--dir", folder.path().to_str().unwrap()];
        let arguments = [&KEEPS_ALL[..], &in_folder, &["--requirepass", SECRET]].concat();
        let node = match authority {
            Some(ca) => RedisServer::with_tls(&ca.server(&["127.0.0.1"]), None, &arguments),
            None => RedisServer::with(&arguments),
        };
        let proxy = Proxy::to(node.port());
        proxy.lose_replies(SECRET.as_bytes(), 1);
        Self {
            proxy,
            node,
            _folder: folder,
        }
    }
}

fn client(nodes: &[Watched], ca: &Authority) -> Builder {
    let hosts = nodes
        .iter()
        .map(|node| format!("127.0.0.1:{}", node.proxy.port()));
    let hosts = hosts.collect::<Vec<_>>().join(",");
    // The operation timeout is long: on a busy machine, the servers may need time for their first
    // TLS connection.
    Locks::builder()
        .url(format!("redlock+tls://default:{SECRET}@{hosts}"))
        .ca_file(ca.file())
        .op_timeout(2 * SOON)
}

/// Checks that clients have sent bytes to each node, and never the password in plain text.
fn none_was_told_the_password(nodes: &[Watched]) {
    for node in nodes {
        assert!(node.proxy.traffic().bytes_up > 0, "it was not even asked");
        assert_eq!(node.proxy.traffic().recognised, 0, "in plain text");
    }
}

async fn locks_are_kept_over_tls_and_nothing_goes_out_in_plain_text(_: Store) {
    let ca = Authority::new();
    let nodes = [(); 3].map(|()| Watched::by(Some(&ca)));
    let [one, other] = [(); 2].map(|()| client(&nodes, &ca).build().unwrap());
    one.ready(SOON).await.unwrap();

    let guard = one.mutex("a").acquire().await.unwrap();
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    nodes[0].node.kill();
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    nodes[1].proxy.cut();
    nodes[1].proxy.restore();
    drop(guard);
    eventually("connected again, and free", 2 * SOON, async || {
        other.mutex("a").try_acquire().await.is_ok()
    })
    .await;

    nothing_is_left(&one).await;
    none_was_told_the_password(&nodes);
}

async fn a_node_that_is_not_trusted_does_not_vote(_: Store) {
    let (ca, other) = (Authority::new(), Authority::new());
    let nodes = [&ca, &ca, &other].map(|authority| Watched::by(Some(authority)));
    let locks = client(&nodes, &ca).build().unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    nodes[0].node.kill();
    let error = locks.mutex("a").wait(SOON / 10).acquire().await;
    assert_eq!(kind(error), ErrorKind::Unavailable);

    // Now the client trusts the authority of the third certificate, and does not trust that of the
    // other two.
    nodes[0].node.restart();
    let locks = client(&nodes[..], &other).build().unwrap();
    let error = locks.mutex("a").wait(SOON).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    for part in ["of 3 nodes are up", "is not from the CA in"] {
        assert!(text.contains(part), "{text}");
    }
    shows_no_password(&(error, text));
    none_was_told_the_password(&nodes);
}

async fn nodes_without_tls_are_told_nothing(_: Store) {
    let ca = Authority::new();
    let nodes = [(); 3].map(|()| Watched::by(None));
    let locks = client(&nodes, &ca).op_timeout(SOON / 5).build().unwrap();

    let error = locks.mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("redlock:// is for them"), "{text}");
    none_was_told_the_password(&nodes);
    for node in &nodes {
        assert_eq!(node.node.command_stats().get("hello"), None);
    }
}
