//! The facts of `bodies` for bodies that have a longest hold, and with it a task that ends them on time.

#[path = "bodies.rs"]
mod bodies;
