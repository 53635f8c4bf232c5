//! From the URL to the file: finds its path, creates it with the right mode, and warns an operator
//! about its location.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use url::Url;

use crate::backend::{Fault, StoreError};
use crate::error::Error;

/// The file that `sqlite:PATH` names.
pub(super) fn file(url: &Url) -> Result<PathBuf, Error> {
    let path = path(url)?;
    // Absolute, so that the path stays the same when the process changes its working directory.
    std::path::absolute(&path)
        .map_err(|error| Error::config(format!("{}: {error}", path.display())))
}

const FORM: &str =
    "the URL is not of the form sqlite:PATH, as sqlite:locks.db or sqlite:/var/lib/shop/locks.db";

fn path(url: &Url) -> Result<PathBuf, Error> {
    if url.path() == ":memory:" {
        return Err(Error::config(
            "SQLite in memory would be a store of one process; for that write \"memory:\"",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Error::config(format!(
            "{FORM}: nothing may follow the path; write %3f for a question mark in it, %23 for a number sign"
        )));
    }
    if url.host_str().is_some_and(|host| !host.is_empty()) {
        return Err(Error::config(format!(
            "{FORM}: two slashes begin a host; write one, or three, or none"
        )));
    }
    let bytes = decoded(url.path());
    if bytes.is_empty() || bytes.ends_with(b"/") || bytes.contains(&0) {
        return Err(Error::config(format!("{FORM}: it names no file")));
    }
    Ok(OsString::from_vec(bytes).into())
}

/// Decodes `%20` to a space. A percent sign without two hexadecimal digits behind it stays as it
/// is.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match (byte, digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(u8::try_from(high * 16 + low).unwrap_or_default());
                at += 3;
            }
            _ => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    decoded
}

/// The canonical path of the file. By this path, the clients of this process that use the same file
/// find each other.
pub(super) fn locate(path: &Path) -> Result<PathBuf, StoreError> {
    match fs::canonicalize(path) {
        Ok(file) => Ok(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(cannot(path, "it names no file", Fault::Config));
            };
            match fs::canonicalize(folder) {
                Ok(folder) => Ok(folder.join(name)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(cannot(
                    path,
                    "the folder does not exist; create it first",
                    Fault::Config,
                )),
                Err(error) => Err(cannot_by(path, &error)),
            }
        }
        Err(error) => Err(cannot_by(path, &error)),
    }
}

/// Creates the file if it does not exist, readable only by its owner, before SQLite writes into it.
/// The files that SQLite puts beside it get the same mode.
///
/// A file that exists is not opened here. Closing it again would drop every lock that this process
/// has on the file through other handles
/// (<https://www.sqlite.org/howtocorrupt.html#_posix_advisory_locks_canceled_by_a_separate_thread_doing_close_>).
pub(super) fn make(file: &Path) -> Result<(), StoreError> {
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file);
    match made {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match fs::metadata(file) {
                Ok(metadata) if metadata.is_dir() => Err(cannot(
                    file,
                    "it is a folder; name a file in it",
                    Fault::Config,
                )),
                Ok(metadata) if !metadata.is_file() => {
                    Err(cannot(file, "it is not a regular file", Fault::Config))
                }
                Ok(_) => Ok(()),
                // Another process removed it between the two calls.
                Err(error) => Err(cannot(file, &error.to_string(), Fault::Retry)),
            }
        }
        Err(error) => Err(cannot_by(file, &error)),
    }
}

/// Identifies the file that a path names at this moment, by its device and its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity(u64, u64);

impl Identity {
    /// # Errors
    ///
    /// Returns `Config` if the file may have another path. SQLite would put another log beside that
    /// path. Processes that use one path would not see the locks of processes that use the other
    /// path.
    pub(super) fn of(file: &Path) -> Result<Self, StoreError> {
        let metadata = fs::metadata(file).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => cannot(file, "it was removed", Fault::Retry),
            _ => cannot_by(file, &error),
        })?;
        let why = if metadata.nlink() > 1 {
            "it has more than one name (hard links), and processes that use different ones do not see each other's locks; \
             leave it one"
        } else if is_mounted(file) {
            "it is mounted by itself, and processes that use its other path do not see the locks of those that use this \
             one; mount the folder it lies in"
        } else {
            return Ok(Self(metadata.dev(), metadata.ino()));
        };
        Err(cannot(file, why, Fault::Config))
    }
}

/// Whether the file itself is a mount point, and not only the folder that it is in. Before Linux
/// 5.8 this is always false.
fn is_mounted(file: &Path) -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags, statx};

        let look = |path: &Path| statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok();
        let Some(found) = look(file) else {
            return false;
        };
        let is_root = StatxAttributes::MOUNT_ROOT;
        if found.stx_attributes_mask.contains(is_root) {
            return found.stx_attributes.contains(is_root);
        }
        let mount = |found: Statx| {
            let known = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
            known.then_some(found.stx_mnt_id)
        };
        let folder = file.parent().and_then(look).and_then(mount);
        matches!((mount(found), folder), (Some(file), Some(folder)) if file != folder)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// The right that this process lacks on the file, on the files that SQLite puts beside it, or on
/// their folder. SQLite itself only says that it cannot open the file.
pub(super) fn lacks(file: &Path) -> Option<String> {
    use rustix::fs::{Access, access};
    use rustix::io::Errno;

    let refused = |path: &Path, how| match access(path, how) {
        Err(Errno::ROFS) => Some(" (its file system is mounted read-only)"),
        Err(Errno::ACCESS | Errno::PERM) => Some(""),
        _ => None,
    };
    let (read_and_write, make) = (
        Access::READ_OK | Access::WRITE_OK,
        Access::WRITE_OK | Access::EXEC_OK,
    );
    for path in ["", "-wal", "-shm"].map(|suffix| beside(file, suffix)) {
        if let Some(why) = refused(&path, read_and_write) {
            let path = path.display();
            return Some(format!("this process may not read and write {path}{why}"));
        }
    }
    let folder = file.parent()?;
    let why = refused(folder, make)?;
    let folder = folder.display();
    Some(format!(
        "this process may not make files in the folder {folder}{why}, and SQLite puts two beside the file"
    ))
}

/// A file that SQLite puts beside the file.
fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(suffix);
    PathBuf::from(path)
}

/// A larger log shows that a reader keeps SQLite from writing it back into the file. Without such a
/// reader it has a few MiB.
const LARGE_LOG: u64 = 64 << 20;

/// Warnings for an operator about the location of the file, and about its log.
pub(super) fn warnings(file: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    let log = beside(file, "-wal");
    if let Ok(metadata) = fs::metadata(&log)
        && metadata.len() > LARGE_LOG
    {
        warnings.push(format!(
            "{} has {} MiB, and grows as long as another program keeps a read transaction open: end that transaction",
            log.display(),
            metadata.len() >> 20
        ));
    }
    if let Some(kind) = network_file_system(file) {
        warnings.push(format!(
            "{} lies on {kind}: processes on other machines do not see the locks of this one, and the file may break; \
             use a local disk, or another store",
            file.display()
        ));
    }
    if let Ok(metadata) = fs::metadata(file)
        && metadata.mode() & 0o007 != 0
    {
        warnings.push(format!(
            "everybody on this machine can open {} (mode {:o}); all who can read it can release the locks in it: chmod o= it",
            file.display(),
            metadata.mode() & 0o777
        ));
    }
    warnings
}

/// The name of the file system if several machines can share it, by the numbers of `statfs(2)`.
fn network_file_system(file: &Path) -> Option<&'static str> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        let kind = rustix::fs::statfs(file).ok()?.f_type;
        match u32::try_from(kind & 0xffff_ffff).ok()? {
            0x6969 => Some("NFS"),
            0x517b => Some("SMB"),
            0xff53_4d42 | 0xfe53_4d42 => Some("CIFS"),
            0x5346_414f | 0x6b41_4653 => Some("AFS"),
            0x0102_1997 => Some("9P"),
            0x00c3_6400 => Some("Ceph"),
            0x0bd0_0bd0 => Some("Lustre"),
            0x0116_1970 => Some("GFS2"),
            0x7461_636f => Some("OCFS2"),
            0x4750_4653 => Some("GPFS"),
            _ => None,
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        let _ = file;
        None
    }
}

fn cannot(file: &Path, why: &str, fault: Fault) -> StoreError {
    StoreError::new(fault, format!("cannot use {}: {why}", file.display()))
}

fn cannot_by(file: &Path, error: &io::Error) -> StoreError {
    let fault = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Fault::Refused,
        io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidFilename => Fault::Config,
        _ => Fault::Retry,
    };
    cannot(file, &error.to_string(), fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> Result<PathBuf, Error> {
        path(&Url::parse(url).unwrap())
    }

    #[test]
    fn a_path_may_be_relative_or_absolute() {
        for (url, expected) in [
            ("sqlite:locks.db", "locks.db"),
            ("sqlite:../run/locks.db", "../run/locks.db"),
            ("sqlite:/run/locks.db", "/run/locks.db"),
            ("sqlite:///run/locks.db", "/run/locks.db"),
            ("sqlite:/run/a%20b%3f.db", "/run/a b?.db"),
            ("sqlite:/run/100%.db", "/run/100%.db"),
            ("sqlite:/run/ä.db", "/run/ä.db"),
        ] {
            assert_eq!(parsed(url).unwrap(), Path::new(expected), "{url}");
        }
    }

    #[test]
    fn a_url_that_would_be_misread_is_refused_with_the_form() {
        for url in [
            "sqlite:",
            "sqlite:///",
            "sqlite:folder/",
            "sqlite://locks.db",
            "sqlite:locks.db?mode=ro",
            "sqlite:locks.db#1",
            "sqlite:a%00b",
        ] {
            let error = parsed(url).expect_err(url);
            assert!(error.to_string().contains("sqlite:PATH"), "{error}");
        }
    }

    #[test]
    fn a_file_that_everybody_can_read_is_warned_of() {
        let file = std::env::temp_dir().join(format!("lockcore-mode-{}", std::process::id()));
        make(&file).unwrap();
        assert_eq!(warnings(&file), Vec::<String>::new());

        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let warned = warnings(&file);
        fs::remove_file(&file).unwrap();
        assert!(warned[0].contains("mode 644"), "{warned:?}");
    }

    #[test]
    fn sqlite_in_memory_points_to_the_memory_store() {
        let error = parsed("sqlite::memory:").unwrap_err();
        assert!(error.to_string().contains("\"memory:\""), "{error}");
    }
}
