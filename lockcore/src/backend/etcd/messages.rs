//! The messages of etcd's API, with only the fields that are used here. The numbers of the fields
//! are those of `rpc.proto` and `kv.proto`:
//! <https://github.com/etcd-io/etcd/tree/main/api>.

use std::time::Duration;

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
    #[prost(uint64, tag = "4")]
    pub(super) raft_term: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(super) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
    #[prost(message, optional, tag = "3")]
    pub(super) prev_kv: Option<KeyValue>,
}

impl Event {
    pub(super) fn is_delete(&self) -> bool {
        self.kind == 1
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
    /// The key keeps its lease.
    #[prost(bool, tag = "6")]
    pub(super) ignore_lease: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutResponse {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteResponse {
    #[prost(int64, tag = "2")]
    pub(super) deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "Op", tags = "1,2,3")]
    pub(super) request: Option<Op>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Op {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(oneof = "Done", tags = "1,2,3")]
    pub(super) response: Option<Done>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Done {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(PutResponse),
    #[prost(message, tag = "3")]
    Delete(DeleteResponse),
}

/// A condition: the revision of the key is equal to this one. A key that does not exist was created
/// at the revision 0.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "1")]
    pub(super) result: i32,
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    #[prost(oneof = "Revision", tags = "5,6")]
    pub(super) revision: Option<Revision>,
    /// The condition is on all keys up to this one. It is true if there are none.
    #[prost(bytes = "vec", tag = "64")]
    pub(super) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Revision {
    #[prost(int64, tag = "5")]
    Created(i64),
    #[prost(int64, tag = "6")]
    Modified(i64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
    #[prost(string, tag = "4")]
    pub(super) error: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseRevokeResponse {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseTimeToLiveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseTimeToLiveResponse {
    /// The seconds that remain. -1 if there is no such lease. A leader that has just been elected may
    /// answer with centuries.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
    /// The seconds that the lease had at first.
    #[prost(int64, tag = "4")]
    pub(super) granted: i64,
}

impl LeaseTimeToLiveResponse {
    /// For how long the lease lives at least. Zero if there is no such lease.
    pub(super) fn certain(&self) -> Duration {
        Duration::from_secs(self.ttl.min(self.granted).max(0).unsigned_abs())
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(oneof = "WatchOp", tags = "1,2")]
    pub(super) request: Option<WatchOp>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum WatchOp {
    #[prost(message, tag = "1")]
    Create(WatchCreate),
    #[prost(message, tag = "2")]
    Cancel(WatchCancel),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    /// The first revision that is told. 0 stands for the next one.
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
    #[prost(bool, tag = "6")]
    pub(super) prev_kv: bool,
    /// The client chooses the number of a watch.
    #[prost(int64, tag = "7")]
    pub(super) watch_id: i64,
    /// The server splits a response that is too long for one message.
    #[prost(bool, tag = "8")]
    pub(super) fragment: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCancel {
    #[prost(int64, tag = "1")]
    pub(super) watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(int64, tag = "2")]
    pub(super) watch_id: i64,
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(string, repeated, tag = "8")]
    pub(super) errors: Vec<String>,
}

/// What is in a range: one key, or all keys that begin with a text.
pub(super) fn one(key: &str) -> RangeRequest {
    RangeRequest {
        key: key.into(),
        ..RangeRequest::default()
    }
}

pub(super) fn all_below(beginning: &str) -> RangeRequest {
    RangeRequest {
        key: beginning.into(),
        range_end: behind(beginning),
        ..RangeRequest::default()
    }
}

/// The first key behind all keys with this beginning. The last byte of the beginning is below 255,
/// because it is a part of UTF-8.
pub(super) fn behind(beginning: &str) -> Vec<u8> {
    let mut end = beginning.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

pub(super) fn put(key: &str, value: String, lease: i64) -> Op {
    Op::Put(PutRequest {
        key: key.into(),
        value: value.into(),
        lease,
        ignore_lease: false,
    })
}

/// Writes a key that keeps its lease.
pub(super) fn rewrite(key: &str, value: String) -> Op {
    Op::Put(PutRequest {
        key: key.into(),
        value: value.into(),
        lease: 0,
        ignore_lease: true,
    })
}

pub(super) fn delete(key: &str) -> Op {
    Op::Delete(DeleteRequest { key: key.into() })
}

/// The condition that a key does not exist.
pub(super) fn is_absent(key: &str) -> Compare {
    was_created(key, 0)
}

/// The condition that a key was created at this revision.
pub(super) fn was_created(key: &str, at: i64) -> Compare {
    const CREATE: i32 = 1;
    Compare {
        result: 0, // equal
        target: CREATE,
        key: key.into(),
        revision: Some(Revision::Created(at)),
        range_end: Vec::new(),
    }
}

/// The condition that a key was written last at this revision.
pub(super) fn was_written(key: &str, at: i64) -> Compare {
    const MOD: i32 = 2;
    Compare {
        result: 0, // equal
        target: MOD,
        key: key.into(),
        revision: Some(Revision::Modified(at)),
        range_end: Vec::new(),
    }
}

/// The condition that there are no keys with this beginning.
pub(super) fn are_absent(beginning: &str) -> Compare {
    Compare {
        range_end: behind(beginning),
        ..is_absent(beginning)
    }
}

/// The condition that no key with this beginning was written after this revision.
pub(super) fn are_unwritten(beginning: &str, since: i64) -> Compare {
    const LESS: i32 = 2;
    Compare {
        result: LESS,
        range_end: behind(beginning),
        ..was_written(beginning, since + 1)
    }
}

/// A transaction. The conditions decide which of the two lists is carried out.
pub(super) fn txn(compare: Vec<Compare>, success: Vec<Op>, failure: Vec<Op>) -> TxnRequest {
    let ops = |ops: Vec<Op>| {
        let ops = ops.into_iter();
        ops.map(|op| RequestOp { request: Some(op) }).collect()
    };
    TxnRequest {
        compare,
        success: ops(success),
        failure: ops(failure),
    }
}

impl TxnResponse {
    pub(super) fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// What each operation has answered.
    pub(super) fn into_done(self) -> impl Iterator<Item = Option<Done>> {
        self.responses.into_iter().map(|response| response.response)
    }

    /// The keys that the ranges of the transaction have found, one list for each range.
    pub(super) fn into_ranges(self) -> impl Iterator<Item = Vec<KeyValue>> {
        self.into_done().filter_map(|done| match done {
            Some(Done::Range(range)) => Some(range.kvs),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It answers so until it knows that it leads.
    #[test]
    fn a_new_leader_that_tells_of_centuries_is_not_believed() {
        for (ttl, granted, certain) in [
            (7, 10, 7),
            (10, 10, 10),
            (9_223_372_036, 10, 10),
            (0, 10, 0),
            (-1, 0, 0),
        ] {
            let answer = LeaseTimeToLiveResponse { ttl, granted };
            assert_eq!(answer.certain().as_secs(), certain, "{answer:?}");
        }
    }

    #[test]
    fn the_end_of_a_range_is_behind_every_key_with_its_beginning() {
        assert_eq!(behind("a/"), b"a0");
        assert!(b"a/\xf4\x8f\xbf\xbf".to_vec() < behind("a/"));
    }

    /// As `etcdctl` sends it: field 1, then the conditions' `CREATE` with the revision in field 5.
    #[test]
    fn a_transaction_has_the_bytes_that_the_server_expects() {
        let bytes = txn(vec![was_created("k", 7)], vec![delete("k")], Vec::new()).encode_to_vec();
        let compare = [0x0a, 7, 0x10, 1, 0x1a, 1, b'k', 0x28, 7];
        let success = [0x12, 5, 0x1a, 3, 0x0a, 1, b'k'];
        assert_eq!(bytes, [compare.as_slice(), &success].concat());
    }
}
