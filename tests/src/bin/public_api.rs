//! Compares the public API of the published crates with the snapshots in `tests/api`, so that no
//! change goes unnoticed. Run `cargo run -p tests --bin public-api`, and add `--update` after an
//! intended change.
//!
//! The program reads rustdoc's JSON, whose format changes with the toolchain. So the program works
//! with one toolchain only. With another toolchain it compares nothing, and says which toolchain it
//! needs. It then succeeds, unless the environment variable `CI` is `true`: a run in CI must
//! compare, so there the program fails.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::Parser;
use tests::toolchain::{self, Verdict};

const CRATES: [&str; 3] = ["lockcore", "lockcore_tower", "lockmacro"];

/// Compares the public API of the published crates with the snapshots in tests/api.
#[derive(Parser)]
#[command(name = "public-api")]
struct Arguments {
    /// Write the snapshots anew
    #[arg(long)]
    update: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (reason, code) = match toolchain::verdict() {
        Verdict::Ours => return compare(arguments),
        Verdict::Another(reason) => (reason, ExitCode::SUCCESS),
        Verdict::Fails(reason) => (reason, ExitCode::FAILURE),
    };
    eprintln!("public-api: nothing is compared: {reason}");
    code
}

fn compare(arguments: Arguments) -> ExitCode {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = std::env::var_os("CARGO_TARGET_DIR");
    let output = output.map_or_else(
        || tests.join("../target"),
        |folder| tests.join("..").join(folder),
    );
    // This builds all features of all members, as for the docs, so that only rustdoc has to run
    // again. Rustdoc gets unstable options, and cargo gets none.
    let written = Command::new("cargo")
        .args([
            "doc",
            "--quiet",
            "--workspace",
            "--lib",
            "--all-features",
            "--no-deps",
        ])
        .current_dir(tests.join(".."))
        .env("RUSTDOC", tests.join("rustdoc-json"))
        .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
        .status();
    if !written.unwrap().success() {
        return ExitCode::FAILURE;
    }
    let mut changed = false;
    for name in CRATES {
        let json = output.join(format!("doc/{name}.json"));
        let api = public_api::Builder::from_rustdoc_json(json)
            .omit_blanket_impls(true)
            .build()
            .unwrap()
            .to_string();
        let file = tests.join(format!("api/{name}.txt"));
        if arguments.update {
            fs::write(&file, api).unwrap();
            continue;
        }
        let known = fs::read_to_string(&file).unwrap_or_default();
        let [before, now] = [&known, &api].map(|text| text.lines().collect::<BTreeSet<_>>());
        for item in before.difference(&now) {
            println!("{name}: - {item}");
        }
        for item in now.difference(&before) {
            println!("{name}: + {item}");
        }
        changed |= before != now;
    }
    if changed {
        eprintln!(
            "public-api: the public API has changed. If that is meant: cargo run -p tests --bin public-api -- --update, \
             and commit tests/api with a word in the CHANGELOG of the crate"
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
