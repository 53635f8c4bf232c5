//! Runs a command with `LOCK_URL` set to a Redis of its own, which is gone when the command has ended:
//! `cargo run -p tests --bin with-redis -- cargo run --example checkout`.

use std::process::{Command, ExitCode};

use tests::redis_server::RedisServer;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: with-redis COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    if let Err(reason) = RedisServer::available() {
        eprintln!("with-redis: {reason}");
        return ExitCode::FAILURE;
    }

    let server = RedisServer::start();
    match Command::new(&program)
        .args(arguments)
        .env("LOCK_URL", server.url())
        .status()
    {
        // A command that a signal ended has no code.
        Ok(status) => status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .map_or(ExitCode::FAILURE, ExitCode::from),
        Err(error) => {
            eprintln!("with-redis: cannot run {}: {error}", program.display());
            ExitCode::FAILURE
        }
    }
}
