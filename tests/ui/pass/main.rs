//! Code that `#[distributed_lock]` accepts. It is compiled without warnings of rustc or clippy, and
//! run.
//!
//! All parts are in one program, so that its dependencies are built and linked once. `cargo clippy`
//! checks it like any other target.

#![deny(warnings, clippy::pedantic)]

mod a_locked_function_warns_of_nothing;
mod async_trait_stands_above;
mod every_shape_of_function_can_be_locked;
mod no_name_of_the_macro_meets_one_of_the_user;
mod options_are_evaluated_once_before_the_lock_is_asked_for;
mod the_body_runs_under_the_lock;
mod the_crate_may_be_reexported;
mod the_error_type_is_the_users;
mod the_future_is_send_if_the_body_is;
mod the_key_is_built_from_the_arguments;
mod tracing_instrument_stands_above_and_below;
mod waiting_ends_when_it_should;
mod what_only_looks_like_a_mistake_is_accepted;

/// The parts run one after the other, because they share the process-wide default client.
#[test]
fn accepted_code_compiles_and_works_as_documented() -> Result<(), lockcore::Error> {
    lockcore::set_default(lockcore::Locks::connect("memory:")?)?;

    a_locked_function_warns_of_nothing::main()?;
    async_trait_stands_above::main()?;
    every_shape_of_function_can_be_locked::main()?;
    no_name_of_the_macro_meets_one_of_the_user::main();
    options_are_evaluated_once_before_the_lock_is_asked_for::main()?;
    the_body_runs_under_the_lock::main()?;
    the_crate_may_be_reexported::main()?;
    the_error_type_is_the_users::main()?;
    the_future_is_send_if_the_body_is::main()?;
    the_key_is_built_from_the_arguments::main()?;
    tracing_instrument_stands_above_and_below::main()?;
    waiting_ends_when_it_should::main()?;
    what_only_looks_like_a_mistake_is_accepted::main()?;
    Ok(())
}
