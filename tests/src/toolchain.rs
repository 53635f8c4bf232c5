//! The toolchain of the expected output: compiler messages and output of rustdoc. It is the version
//! in `rust-version` of the package of the test, the only version that this workspace is tested with.
//! The published packages compile with older ones.

use std::process::Command;

/// Whether the output of this toolchain can be compared with the expected output.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Ours,
    /// Another toolchain, whose texts differ. Nothing is compared. The text says why.
    Another(String),
    /// Another toolchain where everything must be compared, as in CI, or no toolchain at all. This
    /// is a failure. The text says why.
    Fails(String),
}

pub fn verdict() -> Verdict {
    let everything = std::env::var("CI").is_ok_and(|value| value == "true");
    match version() {
        Ok(version) => judge(&version, env!("CARGO_PKG_RUST_VERSION"), everything),
        Err(reason) => Verdict::Fails(reason),
    }
}

/// The version of `rustc`, for example `rustc 1.95.0 (59807616e 2026-04-14)`.
fn version() -> Result<String, String> {
    let output = Command::new("rustc").arg("--version").output();
    let output =
        output.map_err(|error| format!("cannot run rustc: {error}; see https://rustup.rs"))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        return Err(format!("`rustc --version` failed: {}", told.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn judge(version: &str, ours: &str, everything: bool) -> Verdict {
    if belongs(version, ours) {
        return Verdict::Ours;
    }
    let reason = format!(
        "this is {version}, and what is expected was written with {ours}: `rustup toolchain install {ours}`, then set \
         RUSTUP_TOOLCHAIN={ours}"
    );
    match everything {
        true => Verdict::Fails(reason),
        false => Verdict::Another(reason),
    }
}

/// Whether a version belongs to `ours`. `rustc 1.95.0 (59807616e 2026-04-14)` belongs to `1.95` and
/// does not belong to `1.9`.
fn belongs(version: &str, ours: &str) -> bool {
    let number = version.split_whitespace().nth(1).unwrap_or_default();
    let rest = number.strip_prefix(ours);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolchain_is_known_by_its_whole_minor_version() {
        let of = |version: &str| {
            let version = format!("rustc {version} (59807616e 2026-04-14)");
            judge(&version, "1.9", false)
        };

        assert_eq!(of("1.9.3"), Verdict::Ours);
        assert_eq!(of("1.9"), Verdict::Ours);
        for other in ["1.95.0", "1.10.0", "2.1.9"] {
            let Verdict::Another(reason) = of(other) else {
                panic!("{other}");
            };
            assert!(
                reason.contains(other) && reason.contains("install 1.9`"),
                "{reason}"
            );
        }
    }

    #[test]
    fn another_toolchain_fails_where_everything_has_to_be_compared() {
        let Verdict::Fails(reason) = judge("rustc 1.95.0", "1.9", true) else {
            panic!("nothing is compared, and nobody is told");
        };

        assert!(reason.contains("install 1.9`"), "{reason}");
    }
}
