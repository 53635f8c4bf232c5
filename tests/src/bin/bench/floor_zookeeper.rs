//! The floors of ZooKeeper, both with the crate zookeeper-client. One floor is the requests of
//! every lock recipe, one after another. A pair of lockcore must be faster, because it sends these
//! requests without waiting in between. The other floor is the crate's own lock.

use std::collections::HashSet;
use std::time::Duration;

use tokio::task::yield_now;
use url::Url;
use zookeeper_client::{Acls, Client, CreateMode, Error, LockOptions, LockPrefix, OwnedLockClient};

use crate::floor::{self, Floor, Pair, Token, Turns, contend_when_told, many, obey_here};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: Some(warm_up),
    ping: None,
    pair: "create + list + delete",
    pairs: |url, pairs, cold| floor::pairs(RawTicket::connect(url), pairs, cold),
    many: |url, tasks, secs| floor::many(RawTicket::connect(url), tasks, secs),
    turn: "zookeeper-client",
    turns: Turns::OfProcesses {
        contend: |runtime, url, key, tasks, secs, out| {
            contend_when_told(runtime, Recipe::of_tasks(url, key, tasks), secs, out);
        },
        obey: |runtime, url, key| obey_here(runtime, Recipe::of_tasks(url, key, 1)),
    },
    second: None,
};

const PORT: u16 = 2181;
/// As long as the lease of `load`.
const SESSION: Duration = Duration::from_secs(30);
const FOLDER: &str = "/floor";

/// The time of the warm-up. A server in Java is slow until its JIT compiler has compiled the common
/// paths. Floors run before our own measurements, so without a warm-up they would look slower than
/// they are.
const WARM_UP_S: f64 = 8.0;
const WARM_UP_TASKS: usize = 64;

/// Warms the server up.
fn warm_up(url: &str) {
    eprintln!("bench: {WARM_UP_S} s for the server to warm up");
    many(RawTicket::connect(url.to_owned()), WARM_UP_TASKS, WARM_UP_S);
}

/// Creates an ephemeral sequential node, lists its parent, and deletes the node. At the first use
/// of a parent, it sends the parent's create together with the node's, as our client does.
#[derive(Clone)]
pub(crate) struct RawTicket {
    client: Client,
    parents: HashSet<String>,
    /// The number of pairs so far.
    number: usize,
}

impl RawTicket {
    pub(crate) async fn connect(url: String) -> Self {
        Self {
            client: connect(&url).await,
            parents: HashSet::new(),
            number: 0,
        }
    }
}

impl Pair for RawTicket {
    async fn pair(&mut self, key: &str) {
        let container = CreateMode::Container.with_acls(Acls::anyone_all());
        let ticket = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        self.number += 1;
        let parent = format!("{FOLDER}/{key}");
        // The id is as long as a random id of the library.
        let prefix = format!("{parent}/{:032x}-", self.number);
        let sequence = loop {
            let is_new = self.parents.insert(parent.clone());
            // The call itself sends the request, so both requests are in flight at once.
            let made = is_new.then(|| self.client.create(&parent, b"", &container));
            let created = self.client.create(&prefix, b"", &ticket);
            if let Some(made) = made {
                match made.await {
                    Ok(_) | Err(Error::NodeExists) => {} // an earlier run has made it
                    Err(error) => panic!("{error}"),
                }
            }
            match created.await {
                Ok((_, sequence)) => break sequence,
                // The server removes empty parents once a minute.
                Err(Error::NoNode) if !is_new => self.parents.remove(&parent),
                Err(error) => panic!("{error}"),
            };
        };
        let children = self.client.list_children(&parent).await.unwrap();
        assert_eq!(children.len(), 1);
        let path = format!("{prefix}{sequence}");
        self.client.delete(&path, None).await.unwrap();
    }
}

/// The lock of zookeeper-client, `Client::lock`, with node names as in Curator. Tasks with a common
/// client can use this form only.
pub(crate) struct Recipe {
    client: Client,
    folder: String,
    held: Option<OwnedLockClient>,
}

impl Recipe {
    /// Makes one value for each task, with one client for all.
    pub(crate) async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let client = connect(url).await;
        let folder = format!("{FOLDER}/{key}");
        let container = CreateMode::Container.with_acls(Acls::anyone_all());
        client.mkdir(&folder, &container).await.unwrap();
        let recipe = |_| Self {
            client: client.clone(),
            folder: folder.clone(),
            held: None,
        };
        (0..tasks).map(recipe).collect()
    }
}

impl Token for Recipe {
    async fn take(&mut self) {
        let prefix = LockPrefix::new_curator(&self.folder, "lock-").unwrap();
        let options = LockOptions::new(Acls::anyone_all());
        let lock = self.client.lock(prefix, b"", options).await.unwrap();
        self.held = Some(lock.into_owned());
    }

    /// Releases by dropping: a task of the crate sends the delete. This function lets that task
    /// run. It does not wait for the reply.
    async fn give_back(&mut self) {
        self.held = None;
        yield_now().await;
    }
}

/// Connects without credentials.
async fn connect(url: &str) -> Client {
    let url = Url::parse(url).unwrap();
    let (host, port) = (url.host_str().unwrap(), url.port().unwrap_or(PORT));
    let chroot = url.path().trim_end_matches('/');
    let client = Client::connector()
        .with_session_timeout(SESSION)
        .connect(&format!("{host}:{port}{chroot}"))
        .await
        .unwrap();
    let container = CreateMode::Container.with_acls(Acls::anyone_all());
    client.mkdir(FOLDER, &container).await.unwrap();
    client
}
