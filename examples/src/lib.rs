//! One story per file.
