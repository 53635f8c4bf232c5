//! The toolchain that expected output belongs to: messages of the compiler, and what rustdoc writes. It is the one that
//! `rust-version` in `Cargo.toml` names, which is the only one that this workspace is tested with.

use std::process::Command;

/// Why what this toolchain says is not what is expected.
pub fn is_ours() -> Result<(), String> {
    let output = Command::new("rustc").arg("--version").output();
    let output = output.map_err(|error| format!("cannot run rustc: {error}"))?;
    let version = String::from_utf8_lossy(&output.stdout);
    belongs(version.trim(), env!("CARGO_PKG_RUST_VERSION"))
}

/// `rustc 1.95.0 (59807616e 2026-04-14)` belongs to `1.95`, and not to `1.9`.
fn belongs(version: &str, ours: &str) -> Result<(), String> {
    let number = version.split_whitespace().nth(1).unwrap_or_default();
    match number.strip_prefix(ours) {
        Some("") => Ok(()),
        Some(rest) if rest.starts_with('.') => Ok(()),
        _ => Err(format!(
            "this is {version}, and what is expected was written with {ours}: `rustup toolchain install {ours}`, then \
             set RUSTUP_TOOLCHAIN={ours}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolchain_is_known_by_its_whole_minor_version() {
        let of = |version: &str| belongs(&format!("rustc {version} (59807616e 2026-04-14)"), "1.9");

        assert_eq!(of("1.9.3"), Ok(()));
        assert_eq!(of("1.9"), Ok(()));
        for other in ["1.95.0", "1.10.0", "2.1.9"] {
            let reason = of(other).unwrap_err();
            assert!(
                reason.contains(other) && reason.contains("install 1.9`"),
                "{reason}"
            );
        }
    }
}
