//! The tests of `bodies` again, for bodies with a longest hold. A task watches these bodies, and
//! ends them on time.

#[path = "bodies/main.rs"]
mod bodies;
