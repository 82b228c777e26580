// SPDX-License-Identifier: Apache-2.0
//! The hub's cache on disk, in the layout that Python's huggingface_hub shares:
//!
//! ```text
//! CACHE/models--ORG--NAME/refs/main                    a commit
//! CACHE/models--ORG--NAME/snapshots/COMMIT/FILE        -> ../../blobs/ETAG
//! CACHE/models--ORG--NAME/blobs/ETAG                   content, ETAG.incomplete before
//! CACHE/.locks/models--ORG--NAME/ETAG.lock             flock while it is written
//! ```
//!
//! A blob appears under its name whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::failure::{Failure, Kind, Outcome};

pub struct Cache {
    root: PathBuf,
    folder: String,
}

/// Held while a blob is written; given back by closing the file.
pub struct Lock(#[allow(dead_code)] File);

/// What is wrong with the disk, and what to do.
pub fn disk_failure(path: &Path, error: &io::Error) -> Failure {
    let place = path.display();
    match error.raw_os_error() {
        Some(libc::ENOSPC) | Some(libc::EDQUOT) => Failure {
            kind: Kind::ResourceExhausted,
            message: format!(
                "{place}: the disk is full; free some space or set HF_HOME to another disk. What \
                 has come is kept, the next run goes on from there"
            ),
        },
        Some(libc::EACCES) | Some(libc::EROFS) => Failure {
            kind: Kind::PermissionDenied,
            message: format!("{place}: {error}; set HF_HOME to a folder that can be written"),
        },
        _ => Failure { kind: Kind::Internal, message: format!("{place}: {error}") },
    }
}

fn make_folder(path: &Path) -> Outcome<()> {
    fs::create_dir_all(path).map_err(|error| disk_failure(path, &error))
}

/// Some network file systems know this of files alone.
fn sync_folder(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTSUP)) => Ok(()),
        synced => synced,
    }
}

/// What is written to `fresh` becomes `path`, whole even where the machine
/// stops in between.
pub fn settle(fresh: &Path, path: &Path) -> Outcome<()> {
    let folder = path.parent().unwrap_or(path);
    File::open(fresh)
        .and_then(|file| file.sync_all())
        .and_then(|()| fs::rename(fresh, path))
        .and_then(|()| sync_folder(folder))
        .map_err(|error| disk_failure(path, &error))
}

impl Cache {
    pub fn new(root: &str, repo: &str) -> Cache {
        let folder = format!("models--{}", repo.replace('/', "--"));
        Cache { root: PathBuf::from(root), folder }
    }

    fn at(&self, parts: &[&str]) -> PathBuf {
        let mut path = self.root.join(&self.folder);
        path.extend(parts);
        path
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.at(&["blobs", etag])
    }

    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.at(&["blobs", &format!("{etag}.incomplete")])
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.at(&["snapshots", commit])
    }

    /// The commit that `revision` was when it was last asked for.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if self.snapshot(revision).is_dir() {
            return Some(revision.to_string());
        }
        let commit = fs::read_to_string(self.at(&["refs", revision])).ok()?;
        let commit = commit.trim();
        crate::hub_http::is_plain(commit).then(|| commit.to_string())
    }

    pub fn remember(&self, revision: &str, commit: &str) -> Outcome<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.at(&["refs", revision]);
        make_folder(path.parent().unwrap_or(&self.root))?;
        let fresh = self.at(&[&format!("ref.{}.incomplete", std::process::id())]);
        fs::write(&fresh, commit).map_err(|error| disk_failure(&fresh, &error))?;
        settle(&fresh, &path)
    }

    pub fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    /// Makes `file` of the snapshot, or of a folder in it, point to the blob.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Outcome<()> {
        let path = self.snapshot(commit).join(file);
        make_folder(path.parent().unwrap_or(&self.root))?;
        let up = "../".repeat(2 + file.matches('/').count());
        // Over one that points nowhere, too, and never without one meanwhile.
        let fresh = self.at(&["blobs", &format!("{etag}.{}.link", std::process::id())]);
        let _ = fs::remove_file(&fresh);
        std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &fresh)
            .and_then(|()| fs::rename(&fresh, &path))
            .map_err(|error| disk_failure(&path, &error))
    }

    /// Waits for another process that fetches the same blob; `wait` hears of
    /// it once a second.
    pub fn lock(&self, etag: &str, mut wait: impl FnMut()) -> Outcome<Lock> {
        let folder = self.root.join(".locks").join(&self.folder);
        make_folder(&folder)?;
        make_folder(&self.at(&["blobs"]))?;
        let path = folder.join(format!("{etag}.lock"));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| disk_failure(&path, &error))?;
        loop {
            // SAFETY: the descriptor is open as long as `file` lives.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(Lock(file));
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EWOULDBLOCK) {
                return Err(disk_failure(&path, &error));
            }
            wait();
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Bytes that may still be written there; as many as there are if the
    /// system does not say.
    pub fn free_bytes(&self) -> u64 {
        // The folder itself may not exist yet.
        let existing = self.root.ancestors().find(|path| path.exists());
        let Some(path) = existing else { return u64::MAX };
        let mut bytes = path.as_os_str().as_bytes().to_vec();
        bytes.push(0);
        let mut figures = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: a path that ends with 0, and room for the answer.
        if unsafe { libc::statvfs(bytes.as_ptr().cast(), figures.as_mut_ptr()) } != 0 {
            return u64::MAX;
        }
        // SAFETY: filled in by the call that succeeded.
        let figures = unsafe { figures.assume_init() };
        figures.f_bavail.saturating_mul(figures.f_frsize)
    }
}
