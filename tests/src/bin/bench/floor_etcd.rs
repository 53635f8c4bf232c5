//! The floors of etcd, over one HTTP/2 connection of a process, as our client has it. One floor is the
//! least that a lock can cost: a transaction that writes a key with a lease, and a delete. The others
//! are two locks (the peers). The *recipe* is the one of etcd's own clients: a key under the name, and
//! a wait until the keys ahead are deleted, one after another. The *lock service* is the one in the
//! server.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::{Message, Oneof};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic_prost::ProstCodec;
use url::Url;

use crate::floor::{self, Floor, Pair, SECOND, Token, Turns, contend_when_told, obey_here};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: None,
    ping: None,
    pair: "txn + delete",
    pairs: |url, pairs, cold| floor::pairs(Raw::connect(url), pairs, cold),
    many: |url, tasks, secs| floor::many(Raw::connect(url), tasks, secs),
    turn: "recipe of etcd's clients",
    turns: Turns::OfProcesses {
        contend: |runtime, url, key, tasks, secs, out| match key.starts_with(SECOND) {
            true => contend_when_told(runtime, Service::of_tasks(url, key, tasks), secs, out),
            false => contend_when_told(runtime, Recipe::of_tasks(url, key, tasks), secs, out),
        },
        obey: |runtime, url, key| obey_here(runtime, Recipe::of_tasks(url, key, 1)),
    },
    second: Some("etcd's lock service"),
};

/// The ttl of leases in seconds. Nobody keeps them, and no run takes so long.
const TTL: i64 = 600;

/// A key that is written if there is none, and deleted.
#[derive(Clone)]
pub(crate) struct Raw {
    link: Link,
    lease: i64,
}

impl Raw {
    async fn connect(url: String) -> Self {
        let link = Link::connect(&url).await;
        let lease = link.grant().await;
        Self { link, lease }
    }
}

impl Pair for Raw {
    async fn pair(&mut self, key: &str) {
        let key = format!("floor/{key}").into_bytes();
        let put = put_if_absent(&key, self.lease, Vec::new());
        assert!(self.link.txn(put).await.succeeded);
        self.link.delete(key).await;
    }
}

/// The recipe for one task. Each has its own lease, which is in its key, and its own stream of
/// watches.
pub(crate) struct Recipe {
    link: Link,
    beginning: Vec<u8>,
    key: Vec<u8>,
    lease: i64,
    watches: Option<Watches>,
}

type Watches = (
    mpsc::UnboundedSender<WatchRequest>,
    Streaming<WatchResponse>,
);

impl Recipe {
    async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let link = Link::connect(url).await;
        let mut recipes = Vec::new();
        for _ in 0..tasks {
            let lease = link.grant().await;
            recipes.push(Self {
                link: link.clone(),
                beginning: format!("{key}/").into_bytes(),
                key: format!("{key}/{lease:x}").into_bytes(),
                lease,
                watches: None,
            });
        }
        recipes
    }

    /// The oldest key, or the youngest one that is not younger than `newest`.
    fn first(&self, newest: Option<i64>) -> RangeRequest {
        const ASCENDING: i32 = 1;
        const DESCENDING: i32 = 2;
        const CREATE: i32 = 2;
        let mut behind = self.beginning.clone();
        *behind.last_mut().unwrap() += 1;
        RangeRequest {
            key: self.beginning.clone(),
            range_end: behind,
            limit: 1,
            sort_order: newest.map_or(ASCENDING, |_| DESCENDING),
            sort_target: CREATE,
            max_create_revision: newest.unwrap_or(0),
        }
    }

    /// Waits until a key is deleted, which was there at this revision.
    async fn until_deleted(&mut self, key: Vec<u8>, revision: i64) {
        if self.watches.is_none() {
            self.watches = Some(self.link.watches().await);
        }
        let (requests, answers) = self.watches.as_mut().unwrap();
        let ask = |op| requests.send(WatchRequest { op: Some(op) }).unwrap();
        ask(WatchOp::Create(WatchCreate {
            key,
            start_revision: revision + 1,
        }));
        let watch = loop {
            let told = answers.message().await.unwrap().unwrap();
            assert!(told.compact_revision == 0);
            if told.events.iter().any(|event| event.kind == 1) {
                break told.watch_id;
            }
        };
        ask(WatchOp::Cancel(WatchCancel { watch_id: watch }));
    }
}

impl Token for Recipe {
    async fn take(&mut self) {
        let owner = vec![op(Op::Range(self.first(None)))];
        let asked = put_if_absent(&self.key, self.lease, owner);
        let answer = self.link.txn(asked).await;
        assert!(answer.succeeded);
        let mine = answer.header.unwrap().revision;
        let owner = answer.responses.into_iter().find_map(|done| done.range);
        if owner.unwrap().kvs[0].create_revision == mine {
            return;
        }
        loop {
            let ahead = self.link.range(self.first(Some(mine - 1))).await;
            let Some(kv) = ahead.kvs.into_iter().next() else {
                return;
            };
            self.until_deleted(kv.key, ahead.header.unwrap().revision)
                .await;
        }
    }

    async fn give_back(&mut self) {
        self.link.delete(self.key.clone()).await;
    }
}

/// The lock service for one task.
pub(crate) struct Service {
    link: Link,
    name: Vec<u8>,
    lease: i64,
    held: Vec<u8>,
}

impl Service {
    async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let link = Link::connect(url).await;
        let mut locks = Vec::new();
        for _ in 0..tasks {
            locks.push(Self {
                link: link.clone(),
                name: key.into(),
                lease: link.grant().await,
                held: Vec::new(),
            });
        }
        locks
    }
}

impl Token for Service {
    async fn take(&mut self) {
        let asked = LockRequest {
            name: self.name.clone(),
            lease: self.lease,
        };
        let answer: LockResponse = self.link.ask("/v3lockpb.Lock/Lock", asked).await;
        self.held = answer.key;
    }

    async fn give_back(&mut self) {
        let key = std::mem::take(&mut self.held);
        let asked = UnlockRequest { key };
        let _: Nothing = self.link.ask("/v3lockpb.Lock/Unlock", asked).await;
    }
}

/// A connection. It does not connect again.
#[derive(Clone)]
struct Link {
    requests: SendRequest<Body>,
    place: Arc<str>,
}

impl Link {
    async fn connect(url: &str) -> Self {
        let url = Url::parse(url).unwrap();
        let place = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(2379));
        let stream = TcpStream::connect(&place).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let shaken = handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (requests, connection) = shaken.unwrap();
        tokio::spawn(connection);
        let place = place.into();
        Self { requests, place }
    }

    async fn ask<Q, A>(&self, path: &'static str, question: Q) -> A
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.clone());
        grpc.ready().await.unwrap();
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(tonic::Request::new(question), path, codec).await;
        answer.unwrap().into_inner()
    }

    async fn watches(&self) -> Watches {
        let (requests, asked) = mpsc::unbounded_channel();
        let mut grpc = Grpc::new(self.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let asked = tonic::Request::new(UnboundedReceiverStream::new(asked));
        // The server answers when the first watch has begun. This one is told nothing.
        let first = WatchCreate {
            key: b"nothing".to_vec(),
            start_revision: 0,
        };
        let op = Some(WatchOp::Create(first));
        requests.send(WatchRequest { op }).unwrap();
        let answers = grpc.streaming(asked, path, ProstCodec::default()).await;
        (requests, answers.unwrap().into_inner())
    }

    async fn grant(&self) -> i64 {
        let asked = LeaseGrantRequest { ttl: TTL };
        let granted: LeaseGrantResponse = self.ask("/etcdserverpb.Lease/LeaseGrant", asked).await;
        granted.id
    }

    async fn txn(&self, txn: TxnRequest) -> TxnResponse {
        self.ask("/etcdserverpb.KV/Txn", txn).await
    }

    async fn range(&self, range: RangeRequest) -> RangeResponse {
        self.ask("/etcdserverpb.KV/Range", range).await
    }

    async fn delete(&self, key: Vec<u8>) {
        let asked = DeleteRequest { key };
        let _: Nothing = self.ask("/etcdserverpb.KV/DeleteRange", asked).await;
    }
}

impl GrpcService<Body> for Link {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.requests.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let uri = Uri::builder().scheme("http").authority(&*self.place);
        *request.uri_mut() = uri.path_and_query(path).build().unwrap();
        Box::pin(self.requests.send_request(request))
    }
}

/// Writes a key with a lease if there is none, and then does more.
fn put_if_absent(key: &[u8], lease: i64, more: Vec<RequestOp>) -> TxnRequest {
    const CREATE: i32 = 1;
    let absent = Compare {
        target: CREATE,
        key: key.to_vec(),
        created: Some(0),
    };
    let put = PutRequest {
        key: key.to_vec(),
        lease,
    };
    let mut success = vec![op(Op::Put(put))];
    success.extend(more);
    TxnRequest {
        compare: vec![absent],
        success,
    }
}

fn op(request: Op) -> RequestOp {
    RequestOp {
        request: Some(request),
    }
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(int64, tag = "3")]
    revision: i64,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "2")]
    create_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    limit: i64,
    #[prost(int32, tag = "5")]
    sort_order: i32,
    #[prost(int32, tag = "6")]
    sort_target: i32,
    #[prost(int64, tag = "13")]
    max_create_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RequestOp {
    #[prost(oneof = "Op", tags = "1,2")]
    request: Option<Op>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Op {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
}

/// The answer to an operation, of which only a range is read.
#[derive(Clone, PartialEq, Message)]
struct Done {
    #[prost(message, optional, tag = "1")]
    range: Option<RangeResponse>,
}

/// The revision at which the key was created is equal to this one.
#[derive(Clone, PartialEq, Message)]
struct Compare {
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(int64, optional, tag = "5")]
    created: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
    #[prost(bool, tag = "2")]
    succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    responses: Vec<Done>,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchRequest {
    #[prost(oneof = "WatchOp", tags = "1,2")]
    op: Option<WatchOp>,
}

#[derive(Clone, PartialEq, Oneof)]
enum WatchOp {
    #[prost(message, tag = "1")]
    Create(WatchCreate),
    #[prost(message, tag = "2")]
    Cancel(WatchCancel),
}

#[derive(Clone, PartialEq, Message)]
struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "3")]
    start_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchCancel {
    #[prost(int64, tag = "1")]
    watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchResponse {
    #[prost(int64, tag = "2")]
    watch_id: i64,
    #[prost(int64, tag = "5")]
    compact_revision: i64,
    #[prost(message, repeated, tag = "11")]
    events: Vec<Event>,
}

/// A put, or a delete (1).
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(int32, tag = "1")]
    kind: i32,
}

#[derive(Clone, PartialEq, Message)]
struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}
