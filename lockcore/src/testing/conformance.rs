//! Checks of a store: facts that are true of every store that keeps the contract. If you write a
//! store, run them on your [`Backend`](crate::backend::Backend).
//!
//! A fact is a sentence with a test. It checks one part of the [contract](crate::backend) at the
//! connection itself, or it checks through a client what users get from the store. This crate's
//! behaviour suite runs the same facts on its own stores.
//!
//! ```
//! use std::sync::Arc;
//!
//! use lockcore::backend;
//! use lockcore::testing::conformance;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), lockcore::Error> {
//! // In a test of yours: #[tokio::test(flavor = "multi_thread")]
//! let store = backend::open("memory:")?;
//! conformance::check_all(move || Arc::clone(&store)).await;
//! # Ok(()) }
//! ```
//!
//! With a test framework in which tests are values, each fact can be a test of its own: see
//! [`facts`] and [`Fact::check`].
//!
//! The facts do not test what a store does when its server is killed, stopped, cut off or out of
//! memory. They also do not test whether clients in different processes exclude each other. For
//! such tests, the test must control the server and start processes.
//!
//! This module needs the features `testing` and `backend`.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

mod adoptions;
mod capacities;
mod counters;
mod exclusion;
mod fact;
mod histories;
mod kit;
mod operators;
mod requests;
#[doc(hidden)]
pub mod stalls;
#[doc(hidden)]
pub mod steps;
mod subject;
mod values;
mod watches;
mod witness;

use std::sync::Arc;

pub use fact::Fact;
pub use subject::Subject;
pub use witness::{Seen, Visit, Witness};

/// All facts.
#[must_use]
pub fn facts() -> Vec<Fact> {
    [
        requests::all(),
        operators::all(),
        adoptions::all(),
        capacities::all(),
        histories::all(),
        counters::all(),
        watches::all(),
        values::all(),
        exclusion::all(),
    ]
    .concat()
}

/// Checks all facts that apply, one after the other, under each policy. Prints the name of each
/// fact before it begins. Needs a runtime with several threads.
///
/// # Panics
///
/// At the first fact that is not true of the store. Its name was printed last.
pub async fn check_all(subject: impl Subject) {
    let subject: Arc<dyn Subject> = Arc::new(subject);
    let capability = subject.backend().capability();
    for fact in facts() {
        if let Err(reason) = fact.applies_to(&capability) {
            println!("{}: left out, {reason}", fact.name());
            continue;
        }
        println!("{}", fact.name());
        for fair in fact.policies() {
            fact.check(Arc::clone(&subject), *fair).await;
        }
    }
}
