//! Facts about servers with other settings.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use lockcore::backend::{self, EventSink, Namespace};
use tests::mysql_server::MysqlServer;

use super::client;
use crate::faults::builder;
use crate::store::{DEFAULT, Kind, SOON, Store, give_back, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_server_with_the_settings_of_the_guide_gives_no_warning
        a_server_that_does_not_write_each_commit_to_the_disk_gives_a_warning
        a_server_whose_binary_log_is_not_on_the_disk_gives_a_warning
        a_server_that_is_read_only_is_unavailable
    ]
}

/// The warnings of `Locks::ready`, which logs them.
async fn warnings(server: &MysqlServer) -> Vec<String> {
    let locks = client(server);
    locks.ready(SOON).await.unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = backend::open(&server.url()).unwrap().connect(events).await;
    connection.unwrap().check().await.unwrap()
}

async fn a_server_with_the_settings_of_the_guide_gives_no_warning(_: Store) {
    for extra in [
        &[][..],
        &["--log-bin=log", "--server-id=1", "--sync-binlog=1"],
    ] {
        let warnings = warnings(&MysqlServer::with(extra)).await;
        assert!(warnings.is_empty(), "{warnings:?}");
    }
}

async fn a_server_that_does_not_write_each_commit_to_the_disk_gives_a_warning(_: Store) {
    for value in [0, 2] {
        let server = MysqlServer::with(&[&format!("--innodb-flush-log-at-trx-commit={value}")]);
        let warnings = warnings(&server).await;
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let says = warnings[0].contains("innodb_flush_log_at_trx_commit is not 1");
        assert!(says, "{warnings:?}");
    }
}

/// Without a binary log, the setting does not matter.
async fn a_server_whose_binary_log_is_not_on_the_disk_gives_a_warning(_: Store) {
    for value in [0, 100] {
        let setting = format!("--sync-binlog={value}");
        let server = MysqlServer::with(&["--log-bin=log", "--server-id=1", &setting]);
        let warned = warnings(&server).await;
        assert_eq!(warned.len(), 1, "{warned:?}");
        assert!(warned[0].contains("sync_binlog is not 1"), "{warned:?}");

        let warned = warnings(&MysqlServer::with(&[&setting])).await;
        assert!(warned.is_empty(), "{warned:?}");
    }
}

/// The harness's user may write where `read_only` is set.
async fn a_server_that_is_read_only_is_unavailable(_: Store) {
    for setting in ["--read-only=ON", "--innodb-read-only=ON"] {
        let server = MysqlServer::with(&[setting]);
        let locks = builder(server.url()).op_timeout(SOON / 3);
        let locks = locks.build().unwrap();

        let outcome = locks.mutex("a").acquire().await;
        let text = outcome.as_ref().unwrap_err().to_string();
        assert_eq!(kind(outcome), ErrorKind::Unavailable);
        assert!(text.contains("it is read-only"), "{text}");
        assert_eq!(kind(locks.ready(SOON).await), ErrorKind::Unavailable);
    }
}
