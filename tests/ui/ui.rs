//! The messages of the compiler for functions that `#[distributed_lock]` refuses. Functions that it accepts are in
//! `pass`, a program of its own: if no case has to run, trybuild checks all refused ones in one go, and links none.
//!
//! After a change of a message: `TRYBUILD=overwrite cargo test -p ui`, then read the diff. Each toolchain words and places
//! its messages in its own way, so with another one than that of `rust-version` in `Cargo.toml` this shows as ignored. Where
//! `CI` is `true` it fails instead.

use libtest_mimic::{Arguments, Failed, Trial};
use toolchain::Verdict;

#[path = "../src/toolchain.rs"]
#[allow(
    unused_imports,
    reason = "its tests run with the harness, whose module it is"
)]
mod toolchain;

fn main() {
    let name = "the_macro_refuses_what_it_says";
    let trial = match toolchain::verdict() {
        Verdict::Ours => Trial::test(name, || {
            trybuild::TestCases::new().compile_fail("fail/*.rs");
            Ok(())
        }),
        // The kind is printed in brackets before the name, also for what is ignored.
        Verdict::Another(reason) => Trial::test(name, || Ok(()))
            .with_kind(reason)
            .with_ignored_flag(true),
        Verdict::Fails(reason) => Trial::test(name, || Err(Failed::from(reason))),
    };
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}
