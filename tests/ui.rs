//! What `#[distributed_lock]` accepts, and what the compiler says where it does not.
//! After a change of a message: `TRYBUILD=overwrite cargo test -p tests --test ui`, then read the diff.

#[test]
fn the_macro_accepts_and_refuses_what_it_says() {
    let cases = trybuild::TestCases::new();
    cases.pass("ui/pass/*.rs");
    cases.compile_fail("ui/fail/*.rs");
}
