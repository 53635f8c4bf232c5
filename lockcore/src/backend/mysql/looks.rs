//! The server calls nobody. So a client looks whether its tickets that wait are granted: 2 ms after a
//! change, and less often the longer nothing changes, down to ten times a second. Of the tickets of
//! a name, only the first one looks. What the calls of the same client grant, it knows at once.
//!
//! A look is a plain read. So it may see a grant before the disk has it, and a crash may take back
//! the release in front. This is safe: see the top of this store.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::calls::{Call, only, row};
use super::link::{Inner, Spot, now_millis};
use crate::backend::table::Row as _;
use crate::backend::{StoreError, Wake};
use crate::request::Id;

/// So many names are in one call at most.
const NAMES: usize = 1_000;

/// The sweep waits so long after it was begun.
const PAUSE: Duration = Duration::from_secs(5);

/// Runs until it is aborted. If a look fails, the next one repeats it.
pub(super) async fn look(inner: Arc<Inner>) {
    let mut looked = Instant::now();
    // For each name the oldest ticket of its line, as of the last look.
    let mut heads: HashMap<Arc<str>, String> = HashMap::new();
    loop {
        let next = {
            let mut looks = inner.looks();
            looks.forget_ended(now_millis());
            looks.look_at(looked)
        };
        let Some(next) = next else {
            heads.clear();
            inner.waits.notified().await;
            continue;
        };
        let now = Instant::now();
        if next > now {
            tokio::select! {
                () = (inner.timer)(next - now) => {}
                // A ticket begins to wait, so the next look may be sooner.
                () = inner.waits.notified() => continue,
            }
        }
        let firsts = firsts(&inner);
        // They are in the order of their names.
        heads.retain(|name, _| {
            let at = firsts.binary_search_by(|(spot, _)| spot.name.cmp(name));
            at.is_ok()
        });
        for some in firsts.chunks(NAMES) {
            if let Ok(answers) = ask(&inner, some).await {
                for ((spot, id), answer) in some.iter().zip(answers.split(';')) {
                    // An answer that cannot be read tells nothing.
                    let _ = take(&inner, spot, *id, answer, &mut heads);
                }
            }
        }
        looked = Instant::now();
    }
}

/// The first ticket of each name, in the order of the names.
fn firsts(inner: &Inner) -> Vec<(Spot, Id)> {
    let looks = inner.looks();
    let mut firsts: Vec<(Spot, Id)> = Vec::new();
    loop {
        let last = firsts.last().map(|(spot, _)| Spot {
            name: Arc::clone(&spot.name),
            ticket: u64::MAX,
        });
        match looks.first_behind(last) {
            Some(first) => firsts.push(first.clone()),
            None => return firsts,
        }
    }
}

async fn ask(inner: &Arc<Inner>, firsts: &[(Spot, Id)]) -> Result<String, StoreError> {
    let mut asked = Vec::new();
    for (spot, _) in firsts {
        put_name(&mut asked, &spot.name);
        asked.extend(spot.ticket.to_be_bytes());
    }
    let rows = inner.ask(Call::of("look").bytes(asked), Vec::new()).await?;
    Ok(only(rows)?.text("answers")?.unwrap_or_default())
}

/// A name with its length in front, as the procedures read it.
pub(super) fn put_name(asked: &mut Vec<u8>, name: &str) {
    // A key has some 700 bytes at most.
    asked.extend(u16::try_from(name.len()).unwrap_or_default().to_be_bytes());
    asked.extend(name.as_bytes());
}

fn take(
    inner: &Inner,
    spot: &Spot,
    id: Id,
    answer: &str,
    heads: &mut HashMap<Arc<str>, String>,
) -> Result<(), StoreError> {
    let row = row(&["holds", "soonest_in", "head"], answer);
    match row.int("holds")? {
        Some(0) => {}
        Some(_) => {
            // If its state is being asked for, and it still waits after that answer, the next look
            // tells. It comes soon.
            inner.looks().changed();
            // A call may have told of the grant meanwhile.
            if !inner.store().is_asked(id) && inner.looks().is_waiting(id) {
                inner.granted(Wake::new(id, spot.ticket));
            }
            return Ok(());
        }
        // It has gone: a renewal tells the client so.
        None => {
            inner.looks().settled(id);
            inner.recheck(id);
            return Ok(());
        }
    }
    let head = row.text("head")?.unwrap_or_default();
    let before = heads.insert(Arc::clone(&spot.name), head.clone());
    let is_new = before.is_none_or(|before| before != head);
    if is_new {
        inner.looks().changed();
    }
    // The lease of one in front has ended, and nobody has noticed. A renewal removes it. The answer
    // to that renewal says when the next one ends, so one for each head is enough.
    if row.int("soonest_in")? == Some(0) {
        inner.recheck(id);
    }
    Ok(())
}

/// Sweeps, until it is aborted. If a step fails, the next one goes on behind it: the names that it
/// has left out are swept in the next round.
pub(super) async fn sweep(inner: Arc<Inner>) {
    let mut after = String::new();
    loop {
        inner.upkeep.begun().await;
        (inner.timer)(PAUSE).await;
        for _ in 0..inner.upkeep.due() {
            let last = inner.ask(Call::of("sweep").bytes(&after), Vec::new()).await;
            let last = last.and_then(only).and_then(|row| row.text("last"));
            after = last.ok().flatten().unwrap_or_default();
            // The round is over.
            if after.is_empty() {
                break;
            }
        }
    }
}
