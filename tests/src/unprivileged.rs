//! The user `nobody`, for servers that refuse to run as root. If the tests run as another user,
//! such a server runs as that user too.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

/// A program that refuses to run as root.
pub(crate) fn as_unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((user, group)) = unprivileged() {
        command.uid(user).gid(group);
    }
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

/// Gives a file or a folder to the user that the server runs as. What is in the folder stays as it
/// is.
pub(crate) fn give_away(path: &Path) {
    let Some((user, group)) = unprivileged() else {
        return;
    };
    chown(path, Some(user), Some(group)).unwrap();
}

/// Copies a file with a secret to where the server reads it. A server refuses a key that others can
/// read.
pub(crate) fn place(file: &Path, at: &Path) {
    fs::copy(file, at).unwrap();
    fs::set_permissions(at, fs::Permissions::from_mode(0o600)).unwrap();
    give_away(at);
}

/// The user and the group of `nobody`, if this process runs as root.
fn unprivileged() -> Option<(u32, u32)> {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    is_root.then(|| {
        let users = fs::read_to_string("/etc/passwd").unwrap();
        let user = users.lines().find(|line| line.starts_with("nobody:"));
        let mut ids = user.unwrap().split(':').skip(2);
        let mut id = || ids.next().unwrap().parse().unwrap();
        (id(), id())
    })
}
