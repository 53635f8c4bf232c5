//! One story per file, in `examples/`. This crate has no code of its own: it compiles the README's.

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
