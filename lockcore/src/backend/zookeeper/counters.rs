//! Counters, one node each. A change reads the node, and then writes it only if no other client has
//! written it in between. A client that was too late gets a conflict, and the core sends the request
//! again.
//!
//! The times at which changes were made are times of the leader's clock: ZooKeeper keeps the time
//! of a node's last write. The next client that writes the node notes that time with the change.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zookeeper_client::{AddWatchMode, CreateMode, Error as ZkError, EventType, Stat};

use super::errors::failed;
use super::layout::CounterPath;
use super::session::Session;
use crate::backend::{Count, CountOp, Counted, Fault, StoreError};
use crate::clock::Clock;
use crate::counting::{Carried, Record};
use crate::name::Name;

/// How many neighbours of a new counter are checked, and removed if they are not used any more.
const NEIGHBOURS: usize = 4;

/// Reads or changes a counter. If the future is dropped, a write that was sent is carried out.
pub(super) async fn count(session: Arc<Session>, count: Arc<Count>) -> Result<Counted, StoreError> {
    session.usable()?;
    let place = CounterPath::of(&count.name);
    let (client, path) = (&session.client, place.path.as_str());
    // The server may be behind the leader. A change is safe all the same: the server gives an old
    // version of the node, and the leader refuses a write with an old version. But the answer of a
    // read must be at least as new as this call, so the server catches up first.
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
            // If the counter has a version already, the next version is greater by one. Only the
            // first version of a counter is a time.
            let version = if record.exists() { 0 } else { micros() };
            (record, written, version)
        }
        None => (Record::default(), 1, micros()),
    };
    let answer = match record.carry_out(&count, written, version) {
        Carried::Answered(answer) => {
            if let Some((data, stat)) = found {
                keep(&session, path, data, &stat, record.slack());
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

/// Creates the node of a counter. Also creates the folders above the node if they are missing.
async fn create(
    session: &Arc<Session>,
    place: &CounterPath,
    data: &[u8],
) -> Result<(), StoreError> {
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

/// If a counter was not written for longer than `slack`, writes it again as it is, so that it is not
/// removed. No caller waits for this write. Whether it is necessary is decided by this machine's
/// clock. This does no harm unless that clock is slow by more than the counter is kept.
fn keep(session: &Arc<Session>, path: &str, data: Vec<u8>, stat: &Stat, slack: Duration) {
    let written = Duration::from_millis(stat.mtime.unsigned_abs());
    let now = Duration::from_micros(micros());
    if now.saturating_sub(written) < slack {
        return;
    }
    let (session, path, version) = (Arc::clone(session), path.to_owned(), stat.version);
    session.runtime.clone().spawn(async move {
        let _ = session.client.set_data(&path, &data, Some(version)).await;
    });
}

/// Removes some counters that are not used any more. `leader` is the leader's time in milliseconds.
///
/// Each new counter checks some of the counters beside it. So unused counters do not pile up,
/// although no client has a list of all counters.
async fn sweep(session: Arc<Session>, bucket: String, leader: i64) {
    let Ok(mut names) = session.client.list_children(&bucket).await else {
        return;
    };
    fastrand::shuffle(&mut names);
    for name in names.iter().take(NEIGHBOURS) {
        let path = format!("{bucket}/{name}");
        let Ok((data, stat)) = session.client.get_data(&path).await else {
            continue;
        };
        let Ok(record) = decode(&data, &path) else {
            continue;
        };
        if is_unused(stat.mtime, leader, micros() / 1_000, record.life()) {
            // With this version, a counter that was written meanwhile is not deleted.
            let _ = session.client.delete(&path, Some(stat.version)).await;
        }
    }
}

/// Whether a counter was not written for its whole life: by the leader's clock, which has given the
/// time of the write, and by the clock of this machine. If one of them has jumped ahead, no counter
/// is removed because of that. All times are in milliseconds.
fn is_unused(written: i64, leader: i64, here: u64, life: Duration) -> bool {
    let now = leader.max(0).unsigned_abs().min(here);
    let since = now.saturating_sub(written.max(0).unsigned_abs());
    Duration::from_millis(since) > life
}

/// Reports each change of the node to the core from now on. The watch is persistent, so it need not
/// be set again after a change.
pub(super) async fn watch(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.usable()?;
    let path = CounterPath::of(&name).path;
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
    // If the session was disconnected after the server's answer and before the line above, the
    // server has no watch. In this case the call fails.
    session.usable()
}

/// Ends a watch. When the task is aborted, it drops the watcher, and the watcher removes the watch
/// at the server.
pub(super) async fn unwatch(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.state().unwatch(&CounterPath::of(&name).path);
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

/// The error of a request that changes nothing. Its outcome is never unknown.
pub(super) fn not_changed(error: ZkError) -> StoreError {
    let failed = failed(error);
    match failed.fault() {
        Fault::Unknown => StoreError::new(Fault::Retry, failed.to_string()),
        _ => failed,
    }
}

/// The first version of a new counter: the time of this machine's clock. So it is greater than the
/// versions of an earlier counter of the name.
fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_micros().try_into().unwrap_or(1))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_counter_is_unused_only_if_both_clocks_say_so() {
        const HOUR: i64 = 60 * 60 * 1_000;
        let now = 500_000 * HOUR;
        let is_unused = |hours: i64, leader: i64, here: i64| {
            let here = (now + here * HOUR).unsigned_abs();
            let life = super::Duration::from_secs(36 * 3_600);
            super::is_unused(now - hours * HOUR, now + leader * HOUR, here, life)
        };

        assert!(is_unused(37, 0, 0));
        assert!(!is_unused(35, 0, 0));
        assert!(!is_unused(1, 40, 0), "the leader's clock has jumped ahead");
        assert!(!is_unused(1, 0, 40), "the clock of this machine has");
        assert!(!is_unused(37, -40, 0) && !is_unused(37, 0, -40));
    }
}
