//! Tests of the proxy with a server that answers each line with `you said: ` and this line. How
//! Redis clients react to the proxy is tested in tests/selftest.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Instant;

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// A byte that is not held back arrives within this time.
const A_WHILE: Duration = Duration::from_millis(50);

/// A server on a port. The channel has the lines that it received.
fn server() -> (u16, mpsc::Receiver<String>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (told, heard) = mpsc::channel();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let told = told.clone();
            thread::spawn(move || answer(connection.unwrap(), &told));
        }
    });
    (port, heard)
}

fn answer(mut connection: TcpStream, told: &mpsc::Sender<String>) {
    for line in BufReader::new(connection.try_clone().unwrap()).lines() {
        let Ok(line) = line else { return };
        let reply = format!("you said: {line}\n");
        let _ = told.send(line);
        let _ = connection.write_all(reply.as_bytes());
    }
}

struct Client(BufReader<TcpStream>);

impl Client {
    fn of(proxy: &Proxy) -> Self {
        let connection = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        Self(BufReader::new(connection))
    }

    fn say(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn hear(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    fn hear_within(&mut self, within: Duration) -> Option<String> {
        self.0.get_ref().set_read_timeout(Some(within)).unwrap();
        let heard = self.hear().ok();
        self.0.get_ref().set_read_timeout(Some(SOON)).unwrap();
        heard
    }

    /// Whether the connection was reset instead of closed normally.
    fn is_reset(&mut self) -> bool {
        self.hear()
            .is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    }
}

#[test]
fn bytes_go_through_and_are_counted() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);

    client.say("a\n");
    assert_eq!(client.hear().unwrap(), "you said: a");
    client.say("b\n");
    assert_eq!(client.hear().unwrap(), "you said: b");

    let traffic = proxy.traffic();
    let expected = Traffic {
        connections: 1,
        bytes_up: 4,
        bytes_down: 24,
        chunks_up: 2,
        recognised: 0,
        delayed: 0,
        replies_lost: 0,
    };
    assert_eq!(traffic, expected);
}

#[test]
fn only_the_marked_requests_of_one_connection_are_delayed() {
    let (port, heard) = server();
    let proxy = Proxy::to(port);
    let (mut slow, mut fast) = (Client::of(&proxy), Client::of(&proxy));
    proxy.delay_requests(b"marked", 60 * A_WHILE);

    slow.say("a marked one\n");
    while proxy.traffic().delayed == 0 {
        thread::yield_now();
    }
    fast.say("another\n");

    assert_eq!(heard.recv().unwrap(), "another");
    assert_eq!(heard.recv().unwrap(), "a marked one");
    assert_eq!(slow.hear().unwrap(), "you said: a marked one");
    assert_eq!(proxy.traffic().delayed, 1);
}

#[test]
fn a_client_that_shuts_down_still_gets_its_replies() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);

    client.say("a\n");
    client.0.get_ref().shutdown(Shutdown::Write).unwrap();

    assert_eq!(client.hear().unwrap(), "you said: a");
    assert_eq!(client.hear().unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_cut_resets_old_connections_and_new_ones_until_restored() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut old = Client::of(&proxy);
    old.say("a\n");
    old.hear().unwrap();

    proxy.cut();

    assert_eq!(proxy.open_connections(), 0);
    assert!(old.is_reset());
    assert!(Client::of(&proxy).is_reset());

    proxy.restore();
    let mut new = Client::of(&proxy);
    new.say("b\n");
    assert_eq!(new.hear().unwrap(), "you said: b");
    assert_eq!(proxy.traffic().connections, 2);
}

#[test]
fn a_cut_that_the_server_is_not_told_of_resets_clients_alone() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let proxy = Proxy::to(listener.local_addr().unwrap().port());
    let mut client = Client::of(&proxy);
    let (mut served, _) = listener.accept().unwrap();
    client.say("a");
    served.read_exact(&mut [0]).unwrap();
    served.set_read_timeout(Some(A_WHILE)).unwrap();

    proxy.cut_clients();

    assert!(client.is_reset());
    assert!(Client::of(&proxy).is_reset());
    let silence = served.read(&mut [0]).unwrap_err();
    assert_eq!(silence.kind(), ErrorKind::WouldBlock);

    proxy.restore();
    served.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(served.read(&mut [0]).unwrap(), 0);
}

#[test]
fn frozen_bytes_arrive_after_the_thaw_on_the_same_connection() {
    let (port, heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);
    client.say("a\n");
    client.hear().unwrap();
    heard.recv().unwrap();

    proxy.freeze();
    client.say("b\n");
    assert!(heard.recv_timeout(A_WHILE).is_err());

    proxy.thaw();
    assert_eq!(client.hear().unwrap(), "you said: b");
}

#[test]
fn a_frozen_proxy_can_be_cut() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);
    client.say("a\n");
    client.hear().unwrap();

    proxy.freeze();
    client.say("b\n");
    proxy.cut();

    assert!(client.is_reset());
}

#[test]
fn a_request_whose_reply_is_lost_was_carried_out() {
    let (port, heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);

    proxy.lose_replies(b"LOCK", 1);
    client.say("ping\n");
    assert_eq!(client.hear().unwrap(), "you said: ping");
    client.say("LOCK a\n");
    assert!(client.is_reset());

    assert_eq!(heard.recv().unwrap(), "ping");
    assert_eq!(heard.recv().unwrap(), "LOCK a");
    assert_eq!(proxy.traffic().replies_lost, 1);

    let mut again = Client::of(&proxy);
    again.say("LOCK a\n");
    assert_eq!(again.hear().unwrap(), "you said: LOCK a");
}

#[test]
fn a_marker_in_two_pieces_is_recognised() {
    let (port, heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);

    proxy.lose_replies(b"LOCK", 1);
    client.say("first\nLO");
    assert_eq!(client.hear().unwrap(), "you said: first");
    client.say("CK\n");

    assert!(client.is_reset());
    heard.recv().unwrap();
    assert_eq!(heard.recv().unwrap(), "LOCK");
}

#[test]
fn each_direction_has_its_own_delay() {
    let (port, heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);
    let delay = Duration::from_secs(4);

    proxy.delay(Duration::ZERO, delay);
    let began = Instant::now();
    client.say("a\n");
    heard.recv().unwrap();
    let reached = began.elapsed();
    client.hear().unwrap();
    assert!(
        reached < delay && began.elapsed() >= delay,
        "up {reached:?}, and back {:?}",
        began.elapsed()
    );

    let delay = delay / 20;
    proxy.delay(delay, Duration::ZERO);
    let began = Instant::now();
    client.say("b\n");
    heard.recv().unwrap();
    assert!(began.elapsed() >= delay);
}

#[test]
fn chunks_sent_while_others_are_delayed_do_not_wait_in_turn() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);
    let delay = Duration::from_secs(1);
    client.say("warm\n");
    client.hear().unwrap();

    proxy.delay(delay, Duration::ZERO);
    let began = Instant::now();
    for _ in 0..10 {
        client.say("a\n");
        thread::sleep(Duration::from_millis(2)); // so that the lines arrive as separate chunks
    }
    for _ in 0..10 {
        client.hear().unwrap();
    }

    assert!(began.elapsed() < 5 * delay, "{:?}", began.elapsed());
}

#[test]
fn a_server_that_is_down_shows_as_a_reset() {
    let proxy = Proxy::to(crate::ports::free_port());

    assert!(Client::of(&proxy).is_reset());
}

#[test]
fn a_dropped_proxy_closes_its_connections_and_its_port() {
    let (port, _heard) = server();
    let proxy = Proxy::to(port);
    let mut client = Client::of(&proxy);
    client.say("a\n");
    client.hear().unwrap();
    let port = proxy.port();

    drop(proxy);

    assert!(client.hear_within(SOON).is_none());
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
