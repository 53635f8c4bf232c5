//! Runs a command with `LOCK_URL` set to a server of its own, which is gone when the command has ended:
//! `cargo run -p tests --bin with-store -- zookeeper cargo run --example checkout`.

use std::ffi::OsStr;
use std::process::{Command, ExitCode};

use tests::redis_server::RedisServer;
use tests::zookeeper_server::ZooKeeperServer;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [store, command @ ..] = &arguments[..] else {
        return usage();
    };
    // Bound, so that it lives until the command has ended.
    match store.to_str() {
        Some("redis") => RedisServer::available().map_or_else(failure, |()| {
            let server = RedisServer::start();
            run(command, &server.url())
        }),
        Some("zookeeper") => ZooKeeperServer::available().map_or_else(failure, |()| {
            let server = ZooKeeperServer::start();
            run(command, &server.url())
        }),
        _ => usage(),
    }
}

fn run(command: &[impl AsRef<OsStr>], url: &str) -> ExitCode {
    let [program, arguments @ ..] = command else {
        return usage();
    };
    let status = Command::new(program)
        .args(arguments)
        .env("LOCK_URL", url)
        .status();
    match status {
        // A command that a signal ended has no code.
        Ok(status) => status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .map_or(ExitCode::FAILURE, ExitCode::from),
        Err(error) => failure(format!(
            "cannot run {}: {error}",
            program.as_ref().display()
        )),
    }
}

fn failure(reason: String) -> ExitCode {
    eprintln!("with-store: {reason}");
    ExitCode::FAILURE
}

fn usage() -> ExitCode {
    eprintln!("usage: with-store redis|zookeeper COMMAND [ARGUMENT…]");
    ExitCode::from(2)
}
