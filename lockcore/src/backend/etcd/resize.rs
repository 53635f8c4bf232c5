//! Stored capacities. A change reads the line, and then writes the capacity in one transaction.
//!
//! # A grant that is told is never taken back
//!
//! A ticket holds by what is in the line at one revision: the tickets, and the record of the last change.
//! A client may not have seen yet that its ticket holds. So a change must keep each ticket that holds
//! *at the revision of its transaction*, and not only those of the revision that was read. The record
//! has the number of the youngest ticket that held, and all tickets up to this number hold. (They are all
//! that hold, because holders are the oldest tickets, and no ticket ever gets a smaller number.)
//!
//! - **The capacity becomes smaller, or is removed.** The transaction compares the revisions of all
//!   tickets that held when the line was read, and of the first waiter. If one of these tickets was
//!   released, has expired, was adopted or became smaller, the transaction fails. Otherwise exactly the
//!   same tickets hold: the first waiter holds only after one of them has changed, and another waiter
//!   only after the first one has left. If there was no waiter, a new ticket could hold, so no ticket may
//!   have come.
//! - **The capacity becomes larger.** What holds by the smaller one holds by the larger one too. If none
//!   was stored, the oldest ticket is compared, because its capacity is the smaller one.
//! - **Two clients change at the same time.** Each change compares the revision of the record that it
//!   has read. So one of them fails, and its core reads again.
//! - **A change arrives late.** It compares the revision of the record too. And it compares the key of
//!   the client, as an enqueue does: a later connection makes it void.
//! - **An enqueue comes at the same time.** It comes before or after the transaction. After it, the
//!   enqueue reads the record with the line, or compares the revision of the record that its copy has.
//! - **The answer is lost.** The record has the id of the change, so a repetition finds it.
//!
//! If a transaction fails, the core sends the change again.
//!
//! # What is left of a removed capacity
//!
//! The record of the removal stays for one to two minutes, so that a repetition finds it. If more
//! tickets hold than the capacities of the tickets allow, it stays for days, because it says that they
//! hold. A ticket that holds for even longer is then shown as a waiter. It goes on to hold: nobody
//! behind it is let in before it has left.

use std::sync::Arc;

use super::counters;
use super::errors::failed;
use super::layout::{self, Stored};
use super::line::{Copy, Place};
use super::messages::{
    Compare, KeyValue, Op, all_below, are_absent, are_unwritten, delete, one, put, txn, was_written,
};
use super::session::At;
use super::tickets::{marks, replaced};
use crate::backend::{Fault, KEEP, Resize, ResizeOp, ResizeOutcome, Resized, StoreError};
use crate::name::Name;

/// How many tickets one transaction compares. It may have 128 conditions.
const COMPARED: usize = 120;

/// Reads or changes the stored capacity of a name. If the future is dropped, a change that was sent may
/// be carried out.
pub(super) async fn resize(at: Arc<At>, resize: Arc<Resize>) -> Result<Resized, StoreError> {
    let line = at.session.layout.line(&resize.name);
    let listed = at.link.range(all_below(&line)).await?;
    let revision = listed.header.map_or(0, |header| header.revision);
    let copy = Copy::new(&line, revision, &listed.kvs);
    let change = copy.last_change().map(|last| last.change);
    let tickets = copy.places().map(|(_, place)| place.capacity);
    if let Some(outcome) = resize.outcome(copy.stored(), change, tickets) {
        return Ok(Resized::new(copy.stored(), change, outcome));
    }
    let ResizeOp::Set { capacity, .. } = resize.op else {
        return Ok(Resized::new(copy.stored(), change, ResizeOutcome::Applied));
    };
    let through = copy.holders().last().map_or(0, |(number, _)| number);
    let stored = Stored {
        capacity,
        // As before, if all of those have left.
        through: through.max(copy.last_change().map_or(0, |last| last.through)),
        change: resize.id,
    };
    let compare = conditions(&copy, &line, (revision, &listed.kvs), capacity)?;
    match write(&at, &line, &stored, &copy, compare).await? {
        true => Ok(Resized::new(
            capacity,
            Some(resize.id),
            ResizeOutcome::Applied,
        )),
        false => Err(StoreError::conflict(
            "etcd: tickets of the name have come or gone at this moment",
        )),
    }
}

/// The conditions on the tickets for a change to this capacity.
fn conditions(
    copy: &Copy,
    line: &str,
    (revision, listed): (i64, &[KeyValue]),
    capacity: Option<u32>,
) -> Result<Vec<Compare>, StoreError> {
    let holders = copy.holders().count();
    let is_larger = copy
        .capacity()
        .is_some_and(|before| Some(before) <= capacity);
    let compared = match copy.stored() {
        Some(_) if is_larger => 0,
        None if is_larger => 1,
        _ => holders + 1,
    };
    let ahead: Vec<Place> = (copy.places().take(compared))
        .map(|(_, place)| place)
        .collect();
    if ahead.len() > COMPARED {
        return Err(StoreError::new(
            Fault::Refused,
            format!(
                "etcd: more than {COMPARED} tickets hold, and a change to a smaller capacity must compare them all; \
                 try again when fewer hold"
            ),
        ));
    }
    let mut compare: Vec<Compare> = Vec::new();
    for place in &ahead {
        let key = layout::ticket(line, place.id);
        let found = listed.iter().find(|kv| kv.key == key.as_bytes());
        compare.push(was_written(&key, found.map_or(0, |kv| kv.mod_revision)));
    }
    // A capacity is removed only if all tickets have the stated one.
    if ahead.len() < compared || capacity.is_none() {
        compare.push(are_unwritten(line, revision));
    }
    Ok(compare)
}

/// Writes a capacity over what was read. Returns whether the conditions were true.
async fn write(
    at: &At,
    line: &str,
    stored: &Stored,
    copy: &Copy,
    mut compare: Vec<Compare>,
) -> Result<bool, StoreError> {
    let (key, removed) = (layout::capacity(line), layout::resized(line));
    let client = at.session.client_key();
    let [written, removed_at] = copy.changes();
    compare.push(was_written(&key, written));
    compare.push(was_written(&removed, removed_at));
    compare.push(was_written(&client, at.epoch));
    // Events have the order of the writes. So a copy of the line always has one of the two.
    let writes = match stored.capacity {
        Some(_) => vec![put(&key, stored.encode(), 0), delete(&removed)],
        None => {
            let lease = match copy.holds_without_change() {
                true => marks(at).await?,
                false => counters::lease(at, KEEP).await?,
            };
            vec![put(&removed, stored.encode(), lease), delete(&key)]
        }
    };
    let reads = vec![Op::Range(one(&client))];
    let answer = at.link.txn(txn(compare, writes, reads)).await;
    let answer = answer.map_err(|status| at.revoked(&status).unwrap_or_else(|| failed(status)))?;
    if answer.succeeded {
        return Ok(true);
    }
    let client = answer.into_ranges().next().unwrap_or_default().pop();
    match at.is_replaced(client.as_ref()) {
        true => Err(replaced()),
        false => Ok(false),
    }
}

/// Removes the stored capacity of a name that is not in use. If the future is dropped, this may happen
/// later, but not while the name has a ticket.
pub(super) async fn forget(at: Arc<At>, name: Name) -> Result<(), StoreError> {
    let line = at.session.layout.line(&name);
    let listed = at.link.range(all_below(&line)).await?;
    let copy = Copy::new(&line, 0, &listed.kvs);
    let Some(last) = copy.last_change().filter(|last| last.capacity.is_some()) else {
        return Ok(());
    };
    let removed = Stored {
        capacity: None,
        through: 0,
        ..last
    };
    let nobody = vec![are_absent(&layout::tickets(&line))];
    // If somebody was faster, the name is in use, or its capacity has been changed just now.
    write(&at, &line, &removed, &copy, nobody).await.map(drop)
}
