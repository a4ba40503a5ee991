//! Wake files: the folder `FILE.wake` and the files in it, reached through descriptors alone.
//!
//! The folder stands beside the database, where other users may be able to make, exchange and link files. A
//! path that is looked up twice may lead to two places; a descriptor stays with the file on which it was
//! opened.

use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, fchmod,
        fstat,
        inotify::{self, WatchFlags},
        mkdirat, openat, utimensat,
    },
    io::Errno,
    process::geteuid,
};
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// `FILE.wake`, with the mode, owner and group of the database file: they decide which users may use both.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    mode: u32,
    owner: u32,
    group: u32,
}

impl Folder {
    /// The wake folder beside that database.
    pub(crate) fn of(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push(".wake");
        let us = geteuid().as_raw();
        let status = fs::metadata(database).ok();
        let (mode, owner, group) = status.map_or((0o600, us, u32::MAX), |status| {
            (status.mode(), status.uid(), status.gid())
        });
        Self {
            path: path.into(),
            mode: mode & 0o666,
            owner,
            group,
        }
    }

    /// Wakes the clients that watch a file, if it exists.
    pub(crate) fn touch(&self, file: usize) -> io::Result<()> {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        let (folder, _) = self.open()?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(utimensat(&folder, named(file), &times, flags)?)
    }

    /// Watches a file, and makes it if it is missing.
    pub(crate) fn watch(&self, inotify: impl AsFd, file: usize) -> io::Result<i32> {
        let file = self.file(&self.make()?, &named(file))?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(refused("what has the name of a wake file is none"));
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(inotify::add_watch(inotify, path, WATCHED)?)
    }

    /// Opens a file as it is, or makes it for the users of the database, whatever the umask. Other
    /// processes may be making it too.
    fn file(&self, folder: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
        let mode = Mode::from_raw_mode(self.mode);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | CAREFUL;
        match openat(folder, name, flags, mode) {
            Ok(made) => {
                fchmod(&made, mode)?;
                Ok(made)
            }
            Err(Errno::EXIST) => Ok(openat(folder, name, OFlags::PATH | CAREFUL, Mode::empty())?),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the folder, and makes it if it is missing. Its mode is set while it is empty: each process
    /// does so before it makes a file there.
    fn make(&self) -> io::Result<OwnedFd> {
        let mode = self.mode | (self.mode & 0o444) >> 2;
        match mkdirat(CWD, &self.path, Mode::from_raw_mode(mode)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let (folder, status) = self.open()?;
        // Where the database's folder passes on its group (setgid), this folder does too.
        let mode = mode | status.st_mode & 0o2000;
        let is_ours = status.st_uid == geteuid().as_raw();
        if is_ours && status.st_mode & 0o7777 != mode && is_empty(&folder)? {
            fchmod(&folder, Mode::from_raw_mode(mode))?;
        }
        Ok(folder)
    }

    /// Opens the folder as it is. Refuses one that was made by a user that is not known to use the
    /// database.
    fn open(&self) -> io::Result<(OwnedFd, Stat)> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | CAREFUL;
        let folder = openat(CWD, &self.path, flags, Mode::empty())?;
        let status = fstat(&folder)?;
        let users = [0, self.owner, geteuid().as_raw()];
        let is_the_groups = self.mode & 0o020 != 0 && status.st_gid == self.group;
        if users.contains(&status.st_uid) || is_the_groups {
            return Ok((folder, status));
        }
        Err(refused(
            "the folder of the wake files belongs to another user: remove it",
        ))
    }
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn named(file: usize) -> String {
    format!("{file:03x}")
}

fn is_empty(folder: &OwnedFd) -> io::Result<bool> {
    for entry in Dir::read_from(folder)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

const CAREFUL: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);
/// Touched, removed, or moved.
const WATCHED: WatchFlags = WatchFlags::ATTRIB
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

#[cfg(test)]
mod tests {
    use super::Folder;
    use rustix::{
        fd::OwnedFd,
        fs::inotify::{self, CreateFlags},
        process::geteuid,
    };
    use std::{
        fs::{self, Permissions},
        io,
        os::unix::fs::{PermissionsExt, chown, symlink},
        path::{Path, PathBuf},
    };

    const FILE: usize = 7;
    const NAME: &str = "007";

    /// A database that its group may write, in a folder of its own, and the path of its wake files.
    fn shared() -> (tempfile::TempDir, Folder, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("locks.db");
        fs::write(&database, "").unwrap();
        fs::set_permissions(&database, Permissions::from_mode(0o660)).unwrap();
        let wake = folder.path().join("locks.db.wake");
        (folder, Folder::of(&database), wake)
    }

    /// A file for its owner alone.
    fn secret(folder: &Path) -> PathBuf {
        let secret = folder.join("secret");
        fs::write(&secret, "").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        secret
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[allow(deprecated, reason = "the descriptor is owned and stays open")]
    fn instance() -> OwnedFd {
        inotify::init(CreateFlags::CLOEXEC).unwrap()
    }

    fn watch(folder: &Folder) -> io::Result<i32> {
        folder.watch(instance(), FILE)
    }

    #[test]
    fn a_link_in_the_place_of_the_folder_is_not_followed() {
        let (home, folder, wake) = shared();
        let elsewhere = home.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o700)).unwrap();
        symlink(&elsewhere, &wake).unwrap();
        watch(&folder).unwrap_err();
        folder.touch(FILE).unwrap_err();
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
        assert_eq!(mode(&elsewhere), 0o700);
    }

    #[test]
    fn a_link_in_the_place_of_a_file_is_not_followed() {
        let (home, folder, wake) = shared();
        let secret = secret(home.path());
        fs::create_dir(&wake).unwrap();
        symlink(&secret, wake.join(NAME)).unwrap();
        watch(&folder).unwrap_err();
        assert_eq!(mode(&secret), 0o600);
    }

    #[test]
    fn a_folder_of_ours_that_is_in_use_keeps_its_mode() {
        let (_home, folder, wake) = shared();
        fs::create_dir(&wake).unwrap();
        fs::set_permissions(&wake, Permissions::from_mode(0o700)).unwrap();
        fs::write(wake.join("notes"), "").unwrap();
        watch(&folder).unwrap();
        assert_eq!(mode(&wake), 0o700);
        assert_eq!(mode(&wake.join(NAME)), 0o660);
    }

    #[test]
    fn a_folder_of_another_user_is_refused_unless_its_group_may_write_the_database() {
        if !geteuid().is_root() {
            return; // a file can be given to another user by root alone
        }
        let (home, mut folder, wake) = shared();
        fs::create_dir(&wake).unwrap();
        chown(&wake, Some(12_345), Some(12_345)).unwrap();
        watch(&folder).unwrap_err();
        folder.touch(FILE).unwrap_err();
        assert_eq!(fs::read_dir(&wake).unwrap().count(), 0);
        folder.group = 12_345;
        watch(&folder).unwrap();
        folder.mode = 0o600;
        watch(&folder).unwrap_err();
        folder.owner = 12_345;
        watch(&folder).unwrap();
        drop(home);
    }
}
