//! The stored capacities of the memory store. A stored capacity is a part of its name's line, and
//! the line stays as long as the capacity is stored.

use super::Names;
use super::Store;
use super::wakes::Wakes;
use crate::backend::{Resize, Resized};
use crate::name::Name;

impl Store {
    pub(crate) fn resize(&self, resize: &Resize) -> Resized {
        let now = self.clock.now();
        let mut wakes = Wakes::but(resize.id);
        let mut names = self.names();
        let Names {
            lines,
            spare,
            changes,
            receivers,
            ..
        } = &mut *names;
        let line = lines
            .entry(resize.name.clone())
            .or_insert_with(|| std::mem::take(spare));
        if line.change.is_none() {
            let last = changes.get(&resize.name).filter(|(_, end)| *end > now);
            line.change = last.map(|(change, _)| *change);
        }
        wakes.collect(line.expire(now), &line.queue, receivers);
        let (outcome, newly) = line.resize(resize);
        wakes.collect(newly, &line.queue, receivers);
        let resized = Resized::new(line.queue.stored(), line.change, outcome);
        if line.is_over() {
            names.end_line(&resize.name, now);
        }
        resized
    }

    /// Removes the stored capacity of a name that is not in use. A line has no other data then.
    pub(crate) fn forget(&self, name: &Name) {
        let now = self.clock.now();
        let mut names = self.names();
        if let Some(line) = names.lines.get_mut(name)
            && (line.queue.tickets()).all(|(ticket, _)| ticket.expires_at <= now.as_nanos())
        {
            line.queue.expire(now.as_nanos());
            line.queue.resize(None);
            names.end_line(name, now);
        }
    }
}
