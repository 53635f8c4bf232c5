//! Prints the lines of the example. Each line is one write, so that several processes can share a
//! terminal.

use std::fmt;
use std::io::{self, Write as _};
use std::time::Duration;

use lockcore::FencingToken;

use crate::stock::Buyer;

pub fn heading() {
    line(format_args!(
        "{:>7}  {:>6}  {:<8}  {:>6}  {:>19}  {:>10}",
        "process", "client", "through", "ticket", "fencing token", "waited"
    ));
}

/// Prints a sale and its buyer. The buyer prints this line while it holds the lock, so the lines of
/// all processes are in the order of the grants.
pub fn sale(buyer: Buyer, ticket: u32, token: FencingToken, waited: Duration) {
    let Buyer {
        process,
        client,
        through,
    } = buyer;
    let token = token.as_i64();
    let waited = millis(waited);
    line(format_args!(
        "{process:>7}  {client:>6}  {through:<8}  {ticket:>6}  {token:>19}  {waited:>10}"
    ));
}

pub fn refusal(buyer: Buyer, why: &str) {
    let Buyer {
        process,
        client,
        through,
    } = buyer;
    line(format_args!(
        "{process:>7}  {client:>6}  {through:<8}  refused, tries again: {why}"
    ));
}

/// Unlike `println!`, this does not panic when nobody reads the output, as in `checkout | head`.
pub fn line(text: impl fmt::Display) {
    let _ = io::stdout().write_all(format!("{text}\n").as_bytes());
}

pub fn millis(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1e3)
}
