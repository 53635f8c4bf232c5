//! Runs a command with `LOCK_URL` set to a server that is started for it and ends with it. For
//! example, run `cargo run -p tests --bin with-store -- zookeeper cargo run --example checkout`.

use std::ffi::OsStr;
use std::process::{Command, ExitCode};

use tests::stores::{self, Store};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [name, command @ ..] = &arguments[..] else {
        return usage();
    };
    let named = |store: &&dyn Store| name.to_str() == Some(store.name());
    let Some(store) = offered().find(named) else {
        return usage();
    };
    store.available().map_or_else(failure, |()| {
        // This variable keeps the server alive until the command has ended.
        let server = store.start();
        run(command, &server.url())
    })
}

/// The stores that several processes can share.
fn offered() -> impl Iterator<Item = &'static dyn Store> {
    stores::by_url().filter(|store| store.capability().cross_process)
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
        // If a signal has ended the command, there is no exit code.
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
    let names: Vec<&str> = offered().map(Store::name).collect();
    eprintln!("usage: with-store {} COMMAND [ARGUMENT…]", names.join("|"));
    ExitCode::from(2)
}
