//! Strings in JSON.

use std::fmt::Write;

/// Escapes a string as RFC 8259, section 7, requires: quotation mark, reverse solidus and control
/// characters.
pub(super) fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            c if c < ' ' => {
                // Writing to a string cannot fail.
                let _ = write!(json, "\\u{:04x}", u32::from(c));
            }
            c => json.push(c),
        }
    }
    json.push('"');
}
