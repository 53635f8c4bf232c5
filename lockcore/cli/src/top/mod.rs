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
use lockcore::{Locks, Release};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc;

use crate::args::Top;
use crate::exit::{Exit, USAGE};
use crate::{ls, show};
use view::{Do, View};

/// How much time a holder has that is asked for its lock.
const WITHIN: Duration = Duration::from_secs(30);
/// A look that took long is followed by a pause of this many times as long, so that the tool takes
/// at most a fifth of the store's time with one connection.
const PAUSES: u32 = 4;

pub(crate) async fn top(locks: &Locks, top: Top) -> Result<(), Exit> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let text = "top needs a terminal; lockcore ls and lockcore watch print lines";
        return Err(Exit::new(USAGE, text));
    }
    let mut screen = Screen(ratatui::try_init()?);
    let mut keys = keys();
    let mut view = View::new(top.prefix.clone());
    let mut looking = pin!(look(locks, &top, Duration::ZERO));
    let mut asking: FuturesUnordered<BoxFuture<'_, String>> = FuturesUnordered::new();
    loop {
        screen.0.draw(|frame| draw::draw(frame, &view))?;
        tokio::select! {
            (looked, pause) = &mut looking => {
                match looked {
                    Ok(used) => view.looked(used),
                    Err(error) => view.failed(&error.message.unwrap_or_default()),
                }
                looking.set(look(locks, &top, pause));
            }
            event = keys.recv() => match event {
                Some(Event::Key(key)) if key.is_press() => match view.press(key) {
                    Some(Do::Quit) => return Ok(()),
                    Some(Do::Revoke { name, ticket }) => {
                        view.told(format!("{}: asking ticket {ticket}", show::on_one_line(&name)));
                        asking.push(revoke(locks, name, ticket).boxed());
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

/// The terminal, until this is dropped. After that it is as it was before.
struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Looks at the store after a pause. Returns the pause until the next look too.
async fn look(
    locks: &Locks,
    top: &Top,
    pause: Duration,
) -> (Result<Vec<ls::Used>, Exit>, Duration) {
    tokio::time::sleep(pause).await;
    let began = Instant::now();
    let looked = ls::look(locks, &top.prefix).await;
    (looked, top.every.max(began.elapsed() * PAUSES))
}

async fn revoke(locks: &Locks, name: String, ticket: u64) -> String {
    let outcome = locks.revoke(&name, ticket, WITHIN, "lockcore top").await;
    let name = show::on_one_line(&name);
    match outcome {
        Ok(Release::Released) => format!("{name}: ticket {ticket} has ended"),
        Ok(_) => format!("{name}: there is no ticket {ticket} any more"),
        Err(error) => show::on_one_line(&error.to_string()),
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
