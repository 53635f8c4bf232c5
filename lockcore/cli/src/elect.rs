//! `lockcore elect`: a command that runs while this process leads.

use std::process::ExitCode;

use lockcore::Locks;

use crate::args::Elect;
use crate::exit::Exit;
use crate::run::not_taken;
use crate::signals::Signals;
use crate::supervise::{supervise, tell_end};
use crate::until_signal;

pub(crate) async fn elect(
    locks: &Locks,
    elect: Elect,
    signals: &mut Signals,
) -> Result<ExitCode, Exit> {
    let mut election = locks
        .election(&elect.name)
        .value(elect.value)
        .wait(elect.wait);
    if let Some(ttl) = elect.ttl {
        election = election.ttl(ttl);
    }
    // If a signal comes first, the campaign is dropped, and the client gives up the place in line.
    let leader = match until_signal(signals, election.campaign()).await? {
        Ok(leader) => leader,
        Err(error) => {
            return Err(not_taken(locks, &elect.name, elect.busy_exit_code, error).await);
        }
    };
    let outcome = supervise(&leader, &elect.under, signals).await;
    tell_end(&elect.name, leader.resign().await, &outcome);
    outcome
}
