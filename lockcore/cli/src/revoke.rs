//! `lockcore revoke` and `lockcore release`: ending the grant of another.

use std::process::ExitCode;

use lockcore::{Locks, Release as Released};

use crate::args::{Release, Revoke};
use crate::exit::Exit;
use crate::show;

pub(crate) async fn revoke(locks: &Locks, revoke: Revoke) -> Result<ExitCode, Exit> {
    let Revoke {
        name,
        ticket,
        within,
        why,
    } = revoke;
    let outcome = locks.revoke(&name, ticket, within, &why).await?;
    told(&name, ticket, outcome)
}

pub(crate) async fn release(locks: &Locks, release: Release) -> Result<ExitCode, Exit> {
    let Release { name, ticket } = release;
    let outcome = locks.force_release(&name, ticket).await?;
    told(&name, ticket, outcome)
}

/// A ticket that was gone before is a success too: the caller wants it gone.
fn told(name: &str, ticket: u64, outcome: Released) -> Result<ExitCode, Exit> {
    let name = show::on_one_line(name);
    show::line(&match outcome {
        Released::Released => format!("{name}: ticket {ticket} has ended"),
        _ => format!("{name}: there is no ticket {ticket}; see lockcore inspect"),
    })?;
    Ok(ExitCode::SUCCESS)
}
