//! `lockcore revoke` and `lockcore release`: ending the grant of another.

use std::process::ExitCode;

use lockcore::inspect::{TicketInfo, visible};
use lockcore::{FencingToken, Locks, Release as Released};
use serde::Serialize;

use crate::args::{Release, Revoke};
use crate::exit::{self, Exit};
use crate::show;

pub(crate) async fn revoke(locks: &Locks, revoke: Revoke) -> Result<ExitCode, Exit> {
    let Revoke {
        name,
        ticket,
        within,
        why,
        json,
    } = revoke;
    let ticket = meant(&locks.inspect(&name).await?, ticket)?;
    let outcome = locks.revoke(&name, ticket, within, &why).await?;
    told(json, &name, ticket, outcome)
}

pub(crate) async fn release(locks: &Locks, release: Release) -> Result<ExitCode, Exit> {
    let Release { name, ticket, json } = release;
    let ticket = meant(&locks.inspect(&name).await?, ticket)?;
    let outcome = locks.force_release(&name, ticket).await?;
    told(json, &name, ticket, outcome)
}

/// The ticket that a number names: its own number, or the fencing token of its holder.
fn meant(line: &[TicketInfo], number: u64) -> Result<u64, Exit> {
    let of_token = number.to_string().parse().map(FencingToken::ticket).ok();
    let is_there = |ticket: u64| line.iter().any(|place| place.ticket == ticket);
    match of_token.filter(|ticket| is_there(*ticket)) {
        Some(_) if is_there(number) => {
            let text = format!("{number} is a ticket, and the token of another one; see inspect");
            Err(Exit::new(exit::USAGE, text))
        }
        Some(ticket) => Ok(ticket),
        None => Ok(number),
    }
}

/// What became of a ticket, in JSON.
#[derive(Serialize)]
struct Ended<'a> {
    name: &'a str,
    ticket: u64,
    /// False if there was no such ticket.
    ended: bool,
}

fn told(json: bool, name: &str, ticket: u64, outcome: Released) -> Result<ExitCode, Exit> {
    let ended = outcome == Released::Released;
    if json {
        show::json(&Ended {
            name,
            ticket,
            ended,
        })?;
    }
    let name = visible(name);
    match ended {
        true if json => Ok(ExitCode::SUCCESS),
        true => {
            show::line(&format!("{name}: ticket {ticket} has ended"))?;
            Ok(ExitCode::SUCCESS)
        }
        false => {
            let text = format!("{name}: there is no ticket {ticket}; see lockcore inspect");
            Err(Exit::new(exit::NO_TICKET, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_ticket_is_named_by_its_number_or_by_the_token_of_its_holder() {
        let place =
            |ticket| TicketInfo::new(ticket, true, 1, 1, Duration::ZERO, "shop-1/4711/1".into());
        let line = [place(5), place(7), place(7 * 1_024)];

        assert_eq!(meant(&line, 5).ok(), Some(5));
        assert_eq!(meant(&line, 5 * 1_024).ok(), Some(5));
        assert_eq!(meant(&line, 5 * 1_024 + 1_023).ok(), Some(5));
        assert_eq!(meant(&line, 6 * 1_024).ok(), Some(6 * 1_024), "not there");
        assert_eq!(meant(&line, u64::MAX).ok(), Some(u64::MAX), "no token");
        let both = meant(&line, 7 * 1_024).unwrap_err();
        assert_eq!(both.code, exit::USAGE);
    }
}
