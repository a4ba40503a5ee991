//! Clocks and file systems of the kernel, which takes the place of a server: leases are counted by its boot
//! clock.

use dlock_core::{
    Clock, ErrorKind, Instant,
    driver::{DriverError, Result},
};
use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The kernel that this process runs on, as far as leases are concerned.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    boot: String,
    clock: Clock,
}

impl Machine {
    /// The machine on which this process runs, by its boot clock.
    pub(crate) fn here(clock: Clock) -> Result<Self> {
        let boot = fs::read_to_string(BOOT_ID).map_err(|cause| {
            let message = format!(
                "leases in a file are counted by the kernel's boot clock, and {BOOT_ID} does not tell which boot this is: \
                 the SQLite driver needs Linux with /proc"
            );
            DriverError::new(ErrorKind::Unsupported, message).with_source(cause)
        })?;
        let mut boot = boot.trim().to_owned();
        // In a time namespace the boot clock has an offset of its own, so its times mean nothing outside.
        if let Ok(space) = fs::read_link("/proc/self/ns/time")
            && space.as_os_str() != INITIAL_TIME
        {
            boot = format!("{boot} {}", space.display());
        }
        Ok(Self { boot, clock })
    }

    /// Reads the clocks once, for one statement; `None` when the time is after `give_up`.
    pub(crate) fn moment_before(&self, give_up: Instant) -> Option<Moment<'_>> {
        let now = self.clock.now();
        (now <= give_up).then(|| self.at(now))
    }

    /// Reads the clocks once, for one statement.
    pub(crate) fn moment(&self) -> Moment<'_> {
        self.at(self.clock.now())
    }

    fn at(&self, now: Instant) -> Moment<'_> {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Moment {
            boot: &self.boot,
            now: micros(Duration::from_nanos(now.as_nanos())),
            wall: micros(wall),
        }
    }
}

/// One reading of both clocks, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment<'a> {
    /// Which boot, and so which boot clock: `now` means nothing without it.
    pub(crate) boot: &'a str,
    /// Time since this machine booted, by which leases are counted. No step of the wall clock changes it.
    pub(crate) now: i64,
    /// Time since the Unix epoch. Tokens are made from it, and it tells a record of an earlier boot from
    /// one of another machine.
    pub(crate) wall: i64,
}

impl Moment<'_> {
    /// That long from now.
    pub(crate) fn after(&self, span: Duration) -> i64 {
        self.now.saturating_add(micros(span))
    }

    /// How long until then.
    pub(crate) fn until(&self, then: i64) -> Duration {
        Duration::from_micros(u64::try_from(then.saturating_sub(self.now)).unwrap_or(0))
    }

    /// When this machine booted, by the wall clock's present reading.
    pub(crate) fn booted(&self) -> i64 {
        self.wall.saturating_sub(self.now)
    }
}

/// Why a file system cannot carry locks, by the type that `statfs` returns.
///
/// Other kernels use its files too, or a server changes them unseen. Their boot clocks mean nothing here,
/// and the byte-range locks and the shared memory on which SQLite relies do not reach them. FUSE may be
/// local, but `statfs` does not tell.
pub(crate) fn shared_file_system(kind: i64) -> Option<&'static str> {
    let found = SHARED
        .iter()
        .find(|(magic, _)| *magic == kind & 0xffff_ffff);
    found.map(|(_, name)| *name)
}

const SHARED: [(i64, &str); 19] = [
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x517b, "SMB"),
    (0x6573_5546, "FUSE (sshfs, virtiofs and others)"),
    (0x0102_1997, "9p"),
    (0x786f_4256, "vboxsf"),
    (0xbacb_acbc, "vmhgfs"),
    (0x7c7c_6673, "prl_fs"),
    (0x00c3_6400, "Ceph"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x2003_0528, "OrangeFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x5346_414f, "AFS"),
    (0x7375_7245, "Coda"),
    (0x564c, "NCP"),
];

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_nanos().div_ceil(1_000)).unwrap_or(i64::MAX)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
compile_error!(
    "the SQLite driver counts leases by Linux's boot clock and boot id, and watches files by inotify"
);

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The kernel's fixed number of the initial time namespace.
const INITIAL_TIME: &str = "time:[4026531834]";

#[cfg(test)]
mod tests {
    use super::{Machine, Moment, shared_file_system};
    use dlock_core::{Clock, Instant};
    use std::time::Duration;

    #[test]
    fn this_machine_has_a_boot_and_a_clock() {
        let here = Machine::here(Clock::boot()).unwrap();
        assert_eq!(here.boot.split(' ').next().map(str::len), Some(36));
        let first = here.moment();
        let later = here.moment_before(Instant::FAR).unwrap();
        assert!(later.now >= first.now && first.booted() > 0);
        let past = Clock::boot().now() - Duration::from_millis(1);
        assert!(here.moment_before(past).is_none());
    }

    #[test]
    fn spans_are_counted_from_the_boot_clock() {
        let at = Moment {
            boot: "",
            now: 50,
            wall: 70,
        };
        assert_eq!(at.after(Duration::from_nanos(1_001)), 52);
        assert_eq!(at.until(40), Duration::ZERO);
        assert_eq!(at.until(60), Duration::from_micros(10));
        assert_eq!(at.booted(), 20);
    }

    #[test]
    fn file_systems_of_several_kernels_are_known_however_wide_their_type_is() {
        assert_eq!(shared_file_system(0x6969), Some("NFS"));
        for kind in [0xff53_4d42, i64::from(0xff53_4d42_u32.cast_signed())] {
            assert_eq!(shared_file_system(kind), Some("CIFS"));
        }
        for local in [0xef53, 0x0102_1994, 0x9123_683e, 0x5846_5342, 0x794c_7630] {
            assert_eq!(shared_file_system(local), None);
        }
    }
}
