//! Tests of the users of a server: how much they may see of each other, and the least rights that
//! they need. Also a test of the chroot.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::certificates::Authority;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::watch::SECRET;
use tests::zookeeper_server::ZooKeeperServer;
use zookeeper_client::{Acls, Client, CreateMode};

use super::{builder, operator};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, shows_no_password, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_chroot_of_the_url_is_used
        nodes_of_a_user_are_closed_to_others
        a_lock_of_a_user_cannot_be_revoked_by_another
        every_connection_with_tls_is_of_the_user
        credentials_that_are_refused_are_a_mistake
        a_user_with_the_documented_rights_can_do_everything
    ]
}

async fn the_chroot_of_the_url_is_used(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = builder(server.url() + "/app/locks").build().unwrap();

    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("/app/locks"), "{error}");

    let operator = operator(&server).await;
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.mkdir("/app/locks", &options).await.unwrap();
    eventually("works now", SOON, async || locks.ready(SOON).await.is_ok()).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    assert_eq!(server.ephemerals("/app/locks/test:1/{a}/").len(), 1);
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

async fn nodes_of_a_user_are_closed_to_others(_: Store) {
    let server = ZooKeeperServer::start();
    let ann = builder(server.url_with_user("ann", "p@ss:word"))
        .build()
        .unwrap();
    let guard = ann.mutex("a").acquire().await.unwrap();

    for url in [
        server.url(),
        server.url_with_user("ann", "another"),
        server.url_with_user("bob", "p@ss:word"),
    ] {
        let other = builder(url).build().unwrap();
        let error = other.mutex("a").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(!format!("{error} {error:?}").contains("another"));
    }

    let same = builder(server.url_with_user("ann", "p@ss:word"))
        .build()
        .unwrap();
    assert_eq!(kind(same.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    give_back(same.mutex("a").acquire().await.unwrap()).await;
}

async fn a_lock_of_a_user_cannot_be_revoked_by_another(_: Store) {
    let server = ZooKeeperServer::start();
    let user = |name: &str| builder(server.url_with_user(name, SECRET)).build().unwrap();
    let (ann, bob, operator) = (user("ann"), user("bob"), user("ann"));
    let guard = ann.mutex("a").acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();

    for refused in [
        bob.revoke("a", ticket, SOON, "x").await,
        bob.force_release("a", ticket).await,
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("rights"), "{error}");
        shows_no_password(&error);
    }
    assert!(guard.is_valid());
    assert_eq!(operator.inspect("a").await.unwrap()[0].asked_back, None);

    let ended = operator.revoke("a", ticket, std::time::Duration::from_millis(100), "x");
    assert_eq!(ended.await.unwrap(), lockcore::Release::Released);
    assert_eq!(guard.lost().await, lockcore::LostReason::Revoked);
}

/// The first connection belongs to the user. So does each connection that replaces a broken
/// connection.
async fn every_connection_with_tls_is_of_the_user(_: Store) {
    let ca = Authority::new();
    let server = ZooKeeperServer::with_tls(&ca.server(&["127.0.0.1"]), None, &[]);
    let proxy = Proxy::to(server.port());
    let connect = |url: String| {
        let builder = builder(url).ca_file(ca.file()).op_timeout(SOON);
        builder.build().unwrap()
    };
    let through = |url: String| url.replace(&server.port().to_string(), &proxy.port().to_string());
    let ann = connect(through(server.url_with_user("ann", SECRET)));
    let guard = ann.mutex("a").acquire().await.unwrap();

    for url in [server.url(), server.url_with_user("bob", SECRET)] {
        let refused = kind(connect(url).mutex("a").acquire().await);
        assert_eq!(refused, ErrorKind::Config);
    }

    for _ in 0..5 {
        let before = proxy.traffic().connections;
        proxy.cut();
        proxy.restore();
        eventually("connected again", SOON, async || {
            ann.mutex("b").try_acquire().await.is_ok()
        })
        .await;
        assert!(proxy.traffic().connections > before);
    }
    assert!(guard.is_valid(), "by the same session");
    let same = connect(server.url_with_user("ann", SECRET));
    assert_eq!(kind(same.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
}

/// A server accepts any credentials, unless the scheme is switched off.
async fn credentials_that_are_refused_are_a_mistake(_: Store) {
    let refuses = ["DigestAuthenticationProvider.enabled=false"];
    let ca = Authority::new();
    let identity = ca.server(&["127.0.0.1"]);
    let encrypted = ZooKeeperServer::with_tls(&identity, None, &refuses);
    for (server, ca) in [
        (ZooKeeperServer::with(&refuses), None),
        (encrypted, Some(ca.file())),
    ] {
        let mut builder = builder(server.url_with_user("ann", SECRET)).op_timeout(SOON);
        if let Some(ca) = ca {
            builder = builder.ca_file(ca);
        }
        let locks = builder.build().unwrap();
        for _ in 0..3 {
            let error = locks.mutex("a").acquire().await.unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Config, "{text}");
            assert!(
                text.contains("the server refuses the credentials"),
                "{text}"
            );
            shows_no_password(&(error, text));
        }
    }
}

/// The user has the rights that the guide lists. It has no rights at the root. Below the chroot
/// node it has all rights except the right to change rights.
async fn a_user_with_the_documented_rights_can_do_everything(_: Store) {
    use zookeeper_client::{Acl, AuthId, Permission};
    let server = ZooKeeperServer::start();
    let operator = operator(&server).await;
    operator.auth("digest", b"op:op").await.unwrap();
    let open = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create("/locks", b"", &open).await.unwrap();
    // The test sets the same rights as `setAcl /locks digest:ann:<hash>:crd`.
    let rights = [Acl::new(
        Permission::READ | Permission::CREATE | Permission::DELETE,
        AuthId::new("digest", "ann:qqrHIGv6wQBqTWRWAn5AN0ZlqLs="),
    )];
    let user = Client::connector()
        .with_auth("digest", b"ann:secret")
        .connect(&format!("127.0.0.1:{}", server.port()))
        .await
        .unwrap();
    // The server stores the identity that belongs to these credentials.
    let creators = CreateMode::Persistent.with_acls(Acls::creator_all());
    user.create("/whoami", b"", &creators).await.unwrap();
    let (identity, _) = user.get_acl("/whoami").await.unwrap();
    let rights = [Acl::new(
        rights[0].permission(),
        identity[0].auth_id().clone(),
    )];
    operator.set_acl("/locks", &rights, None).await.unwrap();

    let locks = builder(server.url_with_user("ann", "secret") + "/locks")
        .build()
        .unwrap();
    locks.ready(SOON).await.unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    // A downgrade creates one node and deletes another in one request.
    let mut writer = locks.rwlock("a").write().acquire().await.unwrap();
    let reader = begin(locks.rwlock("a").read().wait(SOON));
    tickets(&locks, "a", 2).await;
    writer.downgrade().await.unwrap();
    give_back(reader.await.unwrap().unwrap()).await;
    give_back(writer).await;
}
