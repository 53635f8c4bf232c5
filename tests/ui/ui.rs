//! Tests of the compiler's messages for functions that `#[distributed_lock]` refuses. Functions
//! that the macro accepts are in `pass`, a program of its own. So trybuild has no case to run here:
//! it checks all refused functions together and links none of them.
//!
//! After a change of a message, run `TRYBUILD=overwrite cargo test -p ui` and read the diff. Each
//! toolchain has its own texts and positions for messages. So with a toolchain other than
//! `rust-version` in `tests/ui/Cargo.toml`, this test shows as ignored. If `CI` is `true`, it fails instead.

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
        // The reason is given as the *kind* of the trial, because libtest-mimic prints the kind in
        // brackets before the name, also if the trial is ignored.
        Verdict::Another(reason) => Trial::test(name, || Ok(()))
            .with_kind(reason)
            .with_ignored_flag(true),
        Verdict::Fails(reason) => Trial::test(name, || Err(Failed::from(reason))),
    };
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}
