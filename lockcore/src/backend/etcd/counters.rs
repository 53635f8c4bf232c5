//! Counters, one key each. A change reads the key, and writes it only if no other client has written
//! it in between. A client that was too late gets a conflict, and the core sends the request again.
//!
//! # How long a counter lives
//!
//! A counter has to live for its `keep` after the last request for it, and nobody's wall clock may
//! decide this. So each key has a lease, and the leader counts its time. A lease lasts for twice the
//! `keep`, rounded up to a power of two. A write uses it as long as it lasts for `keep` and half as
//! much again. A request that changes nothing writes the key once more if its lease lasts for less
//! than `keep`.
//!
//! All clients of a namespace share these leases, because such a lease lasts for up to three months,
//! and programs may start every minute. A key for each lifetime has the newest lease of this lifetime,
//! and says by this which one it is. A lifetime gets a new lease when it has used half of it or more,
//! so it has at most five at any time.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::errors::{failed, not_changed};
use super::messages::{is_absent, one, put, txn, was_written};
use super::session::At;
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::clock::Clock;
use crate::counting::{Carried, Record};
use crate::name::Name;

/// Reads or changes a counter. If the future is dropped, a write that was sent may be carried out. A
/// write that comes late fails, if another one has come in between.
pub(super) async fn count(at: Arc<At>, count: Arc<Count>) -> Result<Counted, StoreError> {
    let key = at.session.layout.counter(&count.name);
    let found = at.link.range(one(&key)).await?.kvs.into_iter().next();
    let mut record = match &found {
        Some(kv) => decode(&kv.value, &key)?,
        None => Record::default(),
    };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    let clock = clock.unwrap_or_default();
    let millis = u64::try_from(clock.as_millis()).unwrap_or(u64::MAX);
    // The first version of a counter is a time, so that it is greater than the versions of an earlier
    // counter of the name. The next versions are greater by one.
    let version = match record.exists() {
        true => 0,
        false => u64::try_from(clock.as_micros()).unwrap_or(1),
    };
    let answer = match record.carry_out(&count, millis, version) {
        Carried::Answered(answer) => {
            let Some(kv) = found.filter(|_| record.exists()) else {
                return Ok(answer);
            };
            if lasts(&at, kv.lease).await? >= record.keep() {
                return Ok(answer);
            }
            // As it was, with another lease. If somebody has written it meanwhile, that is enough.
            let lease = lease(&at, record.keep()).await?;
            let value = String::from_utf8_lossy(&kv.value).into_owned();
            let (compare, write) = (was_written(&key, kv.mod_revision), put(&key, value, lease));
            let written = at.link.txn(txn(vec![compare], vec![write], Vec::new()));
            let written = written.await;
            written.map_err(|status| at.revoked(&status).unwrap_or_else(|| not_changed(status)))?;
            return Ok(answer);
        }
        Carried::Changed { answer, .. } => answer,
        Carried::Crowded => return Err(StoreError::crowded()),
    };
    let lease = lease(&at, record.keep()).await?;
    let compare = match &found {
        Some(kv) => was_written(&key, kv.mod_revision),
        None => is_absent(&key),
    };
    let write = put(&key, record.encode(), lease);
    let written = at
        .link
        .txn(txn(vec![compare], vec![write], Vec::new()))
        .await;
    let refused = match written {
        Ok(written) if written.succeeded => return Ok(answer),
        Ok(_) => {
            return Err(StoreError::conflict(
                "etcd: another client has changed the counter at this moment",
            ));
        }
        Err(status) => at.revoked(&status).unwrap_or_else(|| failed(status)),
    };
    if !refused.is_halfway() {
        return Err(refused);
    }
    // The server is full. If it has carried this out all the same, the record remembers the change.
    let found = at.link.range(one(&key)).await?.kvs.into_iter().next();
    let record = found.map(|kv| decode(&kv.value, &key)).transpose()?;
    match record.map(|mut record| record.carry_out(&count, millis, version)) {
        Some(Carried::Answered(answer)) => Ok(answer),
        _ => Err(StoreError::new(Fault::Refused, refused.to_string())),
    }
}

/// A lease that lasts for this time and half as much again, at least. If the future is dropped
/// between the grant and the write of the key, the lease stays without a key until it ends.
pub(super) async fn lease(at: &At, keep: Duration) -> Result<i64, StoreError> {
    let (class, least) = (keep.as_secs().next_power_of_two(), keep + keep / 2);
    let known = at.session.state().of_counters.get(&class).copied();
    if let Some(lease) = known
        && lasts(at, lease).await? >= least
    {
        return Ok(lease);
    }
    let key = (at.session.layout).lease_of_counters(&at.session.namespace, class);
    let found = at.link.range(one(&key)).await?.kvs.into_iter().next();
    if let Some(kv) = &found
        && lasts(at, kv.lease).await? >= least
    {
        at.session.state().of_counters.insert(class, kv.lease);
        return Ok(kv.lease);
    }
    let now = Clock::BOOT.now();
    let seconds = i64::try_from(2 * class).unwrap_or(i64::MAX);
    let (lease, ttl) = at.link.grant(seconds).await?;
    let compare = match &found {
        Some(kv) => was_written(&key, kv.mod_revision),
        None => is_absent(&key),
    };
    let write = put(&key, String::new(), lease);
    let written = at
        .link
        .txn(txn(vec![compare], vec![write], Vec::new()))
        .await;
    if !written.map_err(not_changed)?.succeeded {
        if let Err(error) = at.link.revoke(lease).await {
            tracing::debug!(%error, "a lease of counters was not revoked, and ends by itself");
        }
        return Err(StoreError::conflict(
            "etcd: another client has begun a lease of counters at this moment",
        ));
    }
    let mut state = at.session.state();
    state.of_counters.insert(class, lease);
    state.known.insert(lease, now.after(ttl));
    Ok(lease)
}

/// For how long a lease lasts at least. Nobody keeps leases of counters, so the end of a lease that
/// was asked for once does not change. A lease that is over counts as unknown.
async fn lasts(at: &At, lease: i64) -> Result<Duration, StoreError> {
    let now = Clock::BOOT.now();
    let known = {
        let mut state = at.session.state();
        state.known.retain(|_, until| *until > now);
        state.known.get(&lease).copied()
    };
    if let Some(until) = known {
        return Ok(now.until(until));
    }
    let ttl = at.link.time_to_live(lease).await?;
    at.session.state().known.insert(lease, now.after(ttl));
    Ok(ttl)
}

/// Watches a counter. Resolves when the server has begun.
pub(super) async fn watch(at: Arc<At>, name: Name) -> Result<(), StoreError> {
    let key = at.session.layout.counter(&name);
    let begins = at.session.state().watch(&name, &key);
    let ended = || StoreError::replace(Fault::Retry, "etcd: the connection has ended");
    begins.ok_or_else(ended)?.await.map_err(|_| ended())
}

fn decode(value: &[u8], key: &str) -> Result<Record, StoreError> {
    let record = std::str::from_utf8(value).ok().and_then(Record::decode);
    record.ok_or_else(|| {
        let text = format!(
            "etcd: {key} holds something else than a counter; remove it, or choose another LOCK_NAMESPACE"
        );
        StoreError::new(Fault::Config, text)
    })
}
