//! Counters, one node each. A change reads the node, and then writes it only if no other client has
//! written it in between. A client that was too late gets [`Fault::Retry`], and the core sends the
//! request again.
//!
//! The times at which changes were made are those of the leader: ZooKeeper keeps the time of a
//! node's last write. The next client that writes the node notes that time with the change.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zookeeper_client::{AddWatchMode, CreateMode, Error as ZkError, EventType, Stat};

use super::errors::failed;
use super::layout::Place;
use super::session::Session;
use crate::backend::{Count, CountOp, Counted, Fault, StoreError};
use crate::clock::Clock;
use crate::counting::{Carried, Record};
use crate::name::Name;

/// A counter stays for this time after its last write.
const LIFE: Duration = Duration::from_secs(36 * 60 * 60);

/// If a counter was not written for this time, a read writes it again, so that it is not removed.
/// The counter has a day left at that moment.
const USED_FOR: Duration = Duration::from_secs(12 * 60 * 60);

/// How many neighbours of a new counter are checked, and removed if they are not used any more.
const NEIGHBOURS: usize = 4;

/// Reads or changes a counter. If the future is dropped, a write that was sent is carried out.
pub(super) async fn count(session: Arc<Session>, count: Arc<Count>) -> Result<Counted, StoreError> {
    session.usable()?;
    let place = Place::of(&count.name);
    let (client, path) = (&session.client, place.path.as_str());
    // The server may be behind the leader. For a change this does no harm: the server gives a
    // version that is not the last one, so the write is refused. But the answer of a read must be
    // at least as new as this call, so the server catches up first.
    let synced = (count.op == CountOp::Read).then(|| client.sync(path));
    let read = client.get_data(path);
    if let Some(synced) = synced {
        synced.await.map_err(not_changed)?;
    }
    let found = match read.await {
        Ok(found) => Some(found),
        Err(ZkError::NoNode) => None,
        Err(error) => return Err(not_changed(error)),
    };
    let (mut record, written, version) = match &found {
        Some((data, stat)) => {
            let written = stat.mtime.unsigned_abs();
            let mut record = decode(data, path)?;
            record.made_at(written);
            // If the counter has a version already, the next version is one more, and not a time.
            let version = if record.exists() { 0 } else { micros() };
            (record, written, version)
        }
        None => (Record::default(), 1, micros()),
    };
    let answer = match record.carry_out(&count, written, version) {
        Carried::Answered(answer) => {
            if let Some((data, stat)) = found {
                keep(&session, path, data, &stat);
            }
            return Ok(answer);
        }
        Carried::Changed { answer, .. } => answer,
        Carried::Crowded => return Err(StoreError::crowded()),
    };
    record.made_by_this_write(count.id);
    let data = record.encode();
    let sent = Clock::BOOT.now();
    match found {
        Some((_, stat)) => {
            let written = client.set_data(path, data.as_bytes(), Some(stat.version));
            written.await.map_err(failed)?;
        }
        None => create(&session, &place, data.as_bytes()).await?,
    }
    session.committed(sent);
    Ok(answer)
}

/// Creates the node of a counter, and the folders that it is in if they are missing.
async fn create(session: &Arc<Session>, place: &Place, data: &[u8]) -> Result<(), StoreError> {
    let client = &session.client;
    let node = CreateMode::Persistent.with_acls(session.acls);
    let mut created = client.create(&place.path, data, &node).await;
    if let Err(ZkError::NoNode) = created {
        let container = CreateMode::Container.with_acls(session.acls);
        let folders = place.folders.each_ref();
        let folders = folders.map(|folder| client.create(folder, b"", &container));
        let again = client.create(&place.path, data, &node);
        // All requests are sent by now.
        let mut refused = None;
        for made in folders {
            match made.await {
                Ok(_) | Err(ZkError::NodeExists | ZkError::NoNode) => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        // The reason why a folder could not be created is the better error.
        created = match (again.await, refused) {
            (Err(ZkError::NoNode), Some(refused)) => Err(refused),
            (created, _) => created,
        };
    }
    let (stat, _) = created.map_err(failed)?;
    let [.., bucket] = &place.folders;
    let sweep = sweep(Arc::clone(session), bucket.clone(), stat.ctime);
    session.runtime.spawn(sweep);
    Ok(())
}

/// If a counter was not written for long, writes it again as it is, so that it is not removed.
/// Nobody waits for this write. It depends on this machine's clock, which does no harm unless that
/// clock is more than a day slow.
fn keep(session: &Arc<Session>, path: &str, data: Vec<u8>, stat: &Stat) {
    let written = Duration::from_millis(stat.mtime.unsigned_abs());
    let now = Duration::from_micros(micros());
    if now.saturating_sub(written) < USED_FOR {
        return;
    }
    let (session, path, version) = (Arc::clone(session), path.to_owned(), stat.version);
    session.runtime.clone().spawn(async move {
        let _ = session.client.set_data(&path, &data, Some(version)).await;
    });
}

/// Removes some counters that are not used any more. `now` is the leader's time in milliseconds.
///
/// Each new counter checks some of the counters beside it. So unused counters do not pile up,
/// although no client has a list of all counters.
async fn sweep(session: Arc<Session>, bucket: String, now: i64) {
    let Ok(mut names) = session.client.list_children(&bucket).await else {
        return;
    };
    fastrand::shuffle(&mut names);
    for name in names.iter().take(NEIGHBOURS) {
        let path = format!("{bucket}/{name}");
        let Ok(Some(stat)) = session.client.check_stat(&path).await else {
            continue;
        };
        let unused = Duration::from_millis(now.saturating_sub(stat.mtime).max(0).unsigned_abs());
        if unused > LIFE {
            // With this version, a counter that was written meanwhile is not deleted.
            let _ = session.client.delete(&path, Some(stat.version)).await;
        }
    }
}

/// Tells the core of each change of the node from now on. The watch is persistent, so it need not
/// be set again after a change.
pub(super) async fn watch(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.usable()?;
    let path = Place::of(&name).path;
    if session.state().watches(&path) {
        return Ok(());
    }
    let watching = session.client.watch(&path, AddWatchMode::Persistent);
    let mut watcher = watching.await.map_err(not_changed)?;
    let of = Arc::downgrade(&session);
    let task = session.runtime.spawn(async move {
        loop {
            // After the end of the session the watcher cannot be used: another call would panic.
            match watcher.changed().await.event_type {
                EventType::Session => return,
                EventType::NodeCreated | EventType::NodeDataChanged | EventType::NodeDeleted => {}
                EventType::NodeChildrenChanged => continue,
            }
            let Some(session) = of.upgrade() else { return };
            let events = session.state().events.clone();
            if let Some(events) = events {
                events.changed(name.clone());
            }
        }
    });
    session.state().watch(path, task.abort_handle());
    // If the session was disconnected between the answer and the line above, there is no watch at
    // the server. This is an error then.
    session.usable()
}

/// Ends a watch. The watcher removes it at the server when its task is dropped.
pub(super) async fn unwatch(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.state().unwatch(&Place::of(&name).path);
    Ok(())
}

fn decode(data: &[u8], path: &str) -> Result<Record, StoreError> {
    let record = std::str::from_utf8(data).ok().and_then(Record::decode);
    record.ok_or_else(|| {
        let text = format!(
            "ZooKeeper: {path} holds something else than a counter; remove it, or choose another LOCK_NAMESPACE"
        );
        StoreError::new(Fault::Config, text)
    })
}

/// The error of a request that changes nothing.
pub(super) fn not_changed(error: ZkError) -> StoreError {
    let failed = failed(error);
    match failed.fault() {
        Fault::Unknown => StoreError::new(Fault::Retry, failed.to_string()),
        _ => failed,
    }
}

/// Versions of a new counter begin with the clock, so that they are greater than those of an earlier counter of the name.
fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_micros().try_into().unwrap_or(1))
}
