//! What the compiler says where `#[distributed_lock]` refuses. What it accepts is in `pass`, a program of its own:
//! without a case that runs, trybuild checks all that are refused in one go, and links none.
//!
//! After a change of a message: `TRYBUILD=overwrite cargo test -p ui`, then read the diff.

#[test]
fn the_macro_refuses_what_it_says() {
    trybuild::TestCases::new().compile_fail("fail/*.rs");
}
