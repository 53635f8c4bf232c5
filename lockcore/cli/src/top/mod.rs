//! `lockcore top`: a live view of the names in use, of the line of one name, and of who holds it.
//!
//! `view` has the state and what keys do to it, and `draw` shows it. Neither knows a store or a
//! terminal. Here is the loop that looks at the store, reads the keys, and asks holders.

mod draw;
mod view;

use std::io::IsTerminal as _;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lockcore::inspect::{NameInUse, TicketInfo, visible};
use lockcore::{Locks, Release};
use ratatui::crossterm::event::{self, Event};
use ratatui::widgets::TableState;
use tokio::sync::mpsc;

use crate::args::Top;
use crate::exit::{Exit, USAGE};
use crate::{PAUSES, ls};
use view::{Do, View};

/// How much time a holder has that is asked for its lock.
const WITHIN: Duration = Duration::from_secs(30);

pub(crate) async fn top(locks: &Locks, top: Top) -> Result<(), Exit> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let text = "top needs a terminal; lockcore ls and lockcore watch print lines";
        return Err(Exit::new(USAGE, text));
    }
    // Made first: if the terminal is only half prepared, it is restored too.
    let _restores = Restores;
    let mut screen = ratatui::try_init()?;
    let mut rows = TableState::new();
    let mut keys = keys();
    let mut view = View::new(top.prefix.clone());
    let mut looking = pin!(look(locks, &top, None, Duration::ZERO));
    let mut asking: FuturesUnordered<BoxFuture<'_, String>> = FuturesUnordered::new();
    loop {
        screen.draw(|frame| draw::draw(frame, &view, &mut rows))?;
        let wanted = view.wanted().map(ToOwned::to_owned);
        tokio::select! {
            (looked, pause) = &mut looking => {
                match looked {
                    Ok(Looked::Names(used)) => view.looked(used),
                    Ok(Looked::Line(name, line)) => view.looked_at(&name, line),
                    Err(error) => view.failed(&error.message.unwrap_or_default()),
                }
                looking.set(look(locks, &top, wanted, pause));
            }
            event = keys.recv() => match event {
                Some(Event::Key(key)) if key.is_press() => match view.press(key) {
                    Some(Do::Quit) => return Ok(()),
                    Some(Do::Revoke { name, ticket }) => {
                        view.told(format!("{}: asking ticket {ticket}", visible(&name)));
                        asking.push(revoke(locks, name, ticket).boxed());
                    }
                    None if view.wanted() != wanted.as_deref() => {
                        let wanted = view.wanted().map(ToOwned::to_owned);
                        looking.set(look(locks, &top, wanted, Duration::ZERO));
                    }
                    None => {}
                },
                // Another size: the next draw has it.
                Some(_) => {}
                None => return Ok(()),
            },
            Some(told) = asking.next() => view.told(told),
        }
    }
}

/// Makes the terminal as it was before, when this is dropped.
struct Restores;

impl Drop for Restores {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

enum Looked {
    Names(Vec<NameInUse>),
    Line(String, Vec<TicketInfo>),
}

/// Looks at the store after a pause: at one name, or at all. Returns the pause until the next look
/// too.
async fn look(
    locks: &Locks,
    top: &Top,
    wanted: Option<String>,
    pause: Duration,
) -> (Result<Looked, Exit>, Duration) {
    tokio::time::sleep(pause).await;
    let began = Instant::now();
    let looked = match wanted {
        Some(name) => {
            let line = locks.inspect(&name).await;
            line.map(|line| Looked::Line(name, line))
                .map_err(Exit::from)
        }
        None => ls::look(locks, &top.prefix).await.map(Looked::Names),
    };
    (looked, top.every.max(began.elapsed() * PAUSES))
}

async fn revoke(locks: &Locks, name: String, ticket: u64) -> String {
    let outcome = locks.revoke(&name, ticket, WITHIN, "lockcore top").await;
    let name = visible(&name);
    match outcome {
        Ok(Release::Released) => format!("{name}: ticket {ticket} has ended"),
        Ok(_) => format!("{name}: there is no ticket {ticket} any more"),
        Err(error) => visible(&error.to_string()),
    }
}

/// What comes from the terminal. Reading blocks, so a thread does it. The thread ends with the
/// process, or with the first event that nobody takes.
fn keys() -> mpsc::Receiver<Event> {
    let (tell, told) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if tell.blocking_send(event).is_err() {
                return;
            }
        }
    });
    told
}
