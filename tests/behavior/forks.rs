//! Tests of a process that forks. The child has copies of the parent's sockets and memory, and none
//! of its threads.

use std::process::Command;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::process::Process;

use crate::store::{Kind, SOON, Store, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        in_a_forked_child_the_parents_lock_is_lost_and_stays_the_parents
        a_body_that_forks_is_stopped_in_the_child_where_it_awaits
    ]
}

pub(crate) fn facts_of_counters(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        in_a_forked_child_the_parents_changes_are_an_error
    ]
}

pub(crate) fn facts_of_the_default(store: Kind) -> Vec<Trial> {
    if !store.serves_forked_children() {
        return Vec::new();
    }
    crate::store_facts![store, crate::store::DEFAULT;
        a_forked_child_has_a_default_client_of_its_own
    ]
}

pub(crate) fn facts_of_memory(store: Kind) -> Vec<Trial> {
    // The fact loads a function of its own that replaces the C library's function. So it runs only
    // on Linux with glibc.
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return Vec::new();
    }
    crate::store_facts![store, crate::store::DEFAULT;
        a_process_that_cannot_notice_a_fork_gets_an_error_instead_of_a_client
    ]
}

fn forked(store: &Store, arguments: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forked"));
    command
        .arg(store.url())
        .args(["--namespace", &store.namespace])
        .args(arguments)
        .env("LOCK_OP_TIMEOUT", "30s") // The machine may stand still.
        .env("LOCK_URL", store.url())
        .env("LOCK_NAMESPACE", &store.namespace);
    Process::start(&mut command)
}

async fn in_a_forked_child_the_parents_lock_is_lost_and_stays_the_parents(store: Store) {
    let locks: Locks = store.client();
    let mut forked = forked(&store, &[]);

    assert_eq!(
        forked.expect("CHILD SEES", SOON),
        "Forked AlreadyLost Some(Config)"
    );

    let busy = locks.mutex("parent").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy, "the child has released it");

    // If the child makes a client, this client works, or its error says why it does not.
    if store.kind.serves_forked_children() {
        forked.expect("CHILD HELD", SOON);
        forked.close_input();
        assert_eq!(forked.expect("CHILD RELEASED", SOON), "Released");
    } else {
        let why = forked.expect("CHILD FAILED", SOON);
        assert!(why.starts_with("Config"), "{why}");
        assert!(why.contains("fork"), "{why}");
    }
    forked.close_input();
    assert_eq!(forked.expect("PARENT VALID", SOON), "true");
    forked.finish(SOON);
}

async fn in_a_forked_child_the_parents_changes_are_an_error(store: Store) {
    let mut forked = forked(&store, &["--changes"]);

    for _ in ["counter", "value"] {
        assert_eq!(forked.expect("CHILD TOLD", SOON), "Err(Config)");
    }
    forked.finish(SOON);
}

async fn a_body_that_forks_is_stopped_in_the_child_where_it_awaits(store: Store) {
    let mut forked = forked(&store, &["--body"]);

    assert_eq!(forked.expect("CHILD", SOON), "STOPPED Lost(Forked)");
    forked.expect("PARENT WENT ON", SOON);
    forked.finish(SOON);

    let free = store.client().mutex("parent").try_acquire().await;
    free.expect("the parent has released it")
        .release()
        .await
        .unwrap();
}

async fn a_forked_child_has_a_default_client_of_its_own(store: Store) {
    let mut forked = forked(&store, &["--default"]);

    // The parent has set its default client. The child makes one. The child of the child sets one.
    for process in ["PARENT", "CHILD", "GRANDCHILD"] {
        forked.expect(&format!("{process} WORKED"), SOON);
    }
    for _ in 0..20 {
        forked.expect("CHILD WORKED", SOON);
    }
    // The parent has shut its default client down.
    forked.expect("PARENT FAILED", SOON);
    forked.expect("CHILD WORKED", SOON);
    forked.finish(SOON);
}

async fn a_process_that_cannot_notice_a_fork_gets_an_error_instead_of_a_client(_: Store) {
    // Says that the C library has no memory for a fork handler (ENOMEM).
    const NO_MEMORY: &str =
        "int __register_atfork(void *a, void *b, void *c, void *d) { return 12; }";
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("fork.c"), folder.path().join("fork.so"));
    std::fs::write(&source, NO_MEMORY).unwrap();
    let mut compiler = Command::new("cc"); // Rust links with it, so it is there
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    let compiled = compiler.arg(&source).status().expect("cc runs");
    assert!(compiled.success());

    let mut forked = Command::new(env!("CARGO_BIN_EXE_forked"));
    forked.args(["memory:", "--idle"]);
    let ended = forked.env("LD_PRELOAD", &library).output().unwrap();

    let error = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{error}");
    assert!(error.contains("start it again"), "{error}");
}
