//! Loopback ports for servers and proxies.
//!
//! They are below the range from which the kernel takes the local ports of outgoing connections. A
//! port of that range would be dangerous while its server is down. A client that keeps reconnecting
//! could get this port as its local port and connect to itself. Then the server could not come
//! back.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::Mutex;

/// A listener on a port that no other process listens on.
pub fn listen() -> TcpListener {
    let range = outside_the_ephemeral_range();
    let free = (0..1_000)
        .find_map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, fastrand::u16(range.clone()))).ok());
    free.unwrap_or_else(|| panic!("none of 1,000 loopback ports in {range:?} could be bound"))
}

/// A port that was free a moment ago. Each call returns a different port, so a caller can get
/// several and bind them later. Another process may take the port before a server binds it, so the
/// caller must be ready to call this again.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap();
    let fresh = (0..1_000)
        .map(|_| listen().local_addr().unwrap().port())
        .find(|port| given.insert(*port));
    fresh.expect("a port that this process was not given before")
}

fn outside_the_ephemeral_range() -> Range<u16> {
    // If the range cannot be read, this is the kernel's default.
    let told = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .unwrap_or_else(|_| "32768 60999".into());
    let mut bounds = told
        .split_whitespace()
        .map(|bound| bound.parse::<u16>().unwrap());
    let (low, high) = (bounds.next().unwrap(), bounds.next().unwrap());

    let below = 10_240..low.max(10_240);
    let above = high.saturating_add(1)..u16::MAX;
    if below.len() >= above.len() {
        below
    } else {
        above
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_listeners_never_share_a_port() {
        let (one, other) = (listen(), listen());

        assert_ne!(
            one.local_addr().unwrap().port(),
            other.local_addr().unwrap().port()
        );
    }

    #[test]
    fn no_free_port_is_given_twice() {
        // If the ports were drawn at random from 22,000, about eight pairs of the 600 would be
        // equal.
        let ports: BTreeSet<u16> = (0..600).map(|_| free_port()).collect();

        assert_eq!(ports.len(), 600);
    }

    #[test]
    fn outgoing_connections_are_not_given_these_ports() {
        let listener = listen();
        let port = listener.local_addr().unwrap().port();

        let outgoing = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();

        assert!(!outside_the_ephemeral_range().contains(&outgoing.local_addr().unwrap().port()));
    }
}
