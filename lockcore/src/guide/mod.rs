//! The guide: pages to read, without code of their own.
//!
//! | page | answers |
//! |---|---|
//! | [`fenced_write`] | how to get from a function to a write that nobody can be late with |
//! | [`defaults`] | why is this the default? |
//! | [`logs`] | what is said at which level, and what does a line mean? |
//! | [`trouble`] | what happens when the store is down, the lock lost, the process killed …? |
//!
//! What only one store does is on its own page, in its folder below `lockcore/src/backend/`.

#[doc = include_str!("fenced_write.md")]
pub mod fenced_write {}

#[doc = include_str!("defaults.md")]
pub mod defaults {}

#[doc = include_str!("logs.md")]
pub mod logs {}

#[doc = include_str!("trouble.md")]
pub mod trouble {}
