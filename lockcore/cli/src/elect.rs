//! `lockcore elect`: a command that runs while this process leads.

use std::process::ExitCode;

use lockcore::Locks;

use crate::args::Elect;
use crate::exit::Exit;
use crate::say::say;
use crate::signals::Signals;
use crate::supervise::supervise;
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
    let leader = until_signal(signals, election.campaign()).await??;
    let outcome = supervise(&leader, &elect.under, signals).await;
    if let Err(error) = leader.resign().await {
        say(error);
    }
    outcome
}
