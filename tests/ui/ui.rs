//! What `#[distributed_lock]` accepts, and what the compiler says where it does not.
//! After a change of a message: `TRYBUILD=overwrite cargo test -p ui`, then read the diff.

//!
//! Two tests: without a case that runs among them, trybuild checks all that are refused in one go, and links none.

#[test]
fn the_macro_accepts_what_it_says() {
    trybuild::TestCases::new().pass("pass/*.rs");
}

#[test]
fn the_macro_refuses_what_it_says() {
    trybuild::TestCases::new().compile_fail("fail/*.rs");
}
