//! CPU placement of a client and its server.
//!
//! A lock's cycle takes some tens of microseconds. Moving one of the two to another core, or waking an
//! idle core of a virtual machine, changes that by about a hundred. Without placement the kernel
//! decides anew for each contestant, and so decides the comparison.

use crate::Result;
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Where the client and the server run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// One core each: a waiting side sleeps, as if the server were another machine.
    Apart,
    /// One core for both: neither side sleeps, and the measure is the CPU cost of both.
    Together,
}

/// Pins all threads of this process and of its servers. On drop, the threads of this process may run on
/// any core again.
#[derive(Debug)]
pub(crate) struct Placed {
    before: CpuSet,
    /// The number of cores that are used.
    pub(crate) cores: usize,
}

impl Placement {
    /// When this process may use one core only, both share it.
    pub(crate) fn take(self, servers: &[u32]) -> Result<Placed> {
        let allowed = sched_getaffinity(Pid::from_raw(0))?;
        let all = 0..CpuSet::count();
        let mut cores = all.filter(|core| allowed.is_set(*core).unwrap_or(false));
        let ours = cores.next().ok_or("no core that may be used")?;
        let theirs = match self {
            Self::Together => ours,
            Self::Apart => cores.next().unwrap_or(ours),
        };
        let placed = Placed {
            before: allowed,
            cores: if ours == theirs { 1 } else { 2 },
        };
        for server in servers {
            settle(*server, &only(theirs)?)?;
        }
        settle(std::process::id(), &only(ours)?)?;
        Ok(placed)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        drop(settle(std::process::id(), &self.before));
    }
}

fn only(core: usize) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    set.set(core)?;
    Ok(set)
}

/// Threads that these start later inherit their placement.
fn settle(process: u32, place: &CpuSet) -> Result {
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let thread = thread?.file_name();
        let thread = thread.to_str().ok_or("a thread without a number")?;
        match sched_setaffinity(Pid::from_raw(thread.parse()?), place) {
            Ok(()) | Err(Errno::ESRCH) => {} // a thread that has ended needs no placement
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Placement, sched_getaffinity};
    use nix::{sched::CpuSet, unistd::Pid};
    use std::{process::Command, sync::mpsc, thread};

    fn cores(process: u32) -> usize {
        let set = sched_getaffinity(Pid::from_raw(process as i32)).unwrap();
        (0..CpuSet::count())
            .filter(|core| set.is_set(*core).unwrap())
            .count()
    }

    #[test]
    fn every_thread_is_placed_and_free_again() {
        let before = cores(std::process::id());
        let mut server = Command::new("sleep").arg("60").spawn().unwrap();
        let (ask, asked) = mpsc::channel::<()>();
        let (say, said) = mpsc::channel();
        let other = thread::spawn(move || {
            for () in asked {
                say.send(cores(0)).unwrap();
            }
        });
        let elsewhere = || {
            ask.send(()).unwrap();
            said.recv().unwrap()
        };
        for placement in [Placement::Together, Placement::Apart] {
            let placed = placement.take(&[server.id()]).unwrap();
            let server = sched_getaffinity(Pid::from_raw(server.id() as i32)).unwrap();
            let here = sched_getaffinity(Pid::from_raw(0)).unwrap();
            assert_eq!(server == here, placed.cores == 1);
            let apart = placement == Placement::Apart && before > 1;
            assert_eq!(placed.cores, if apart { 2 } else { 1 });
            assert_eq!((elsewhere(), cores(0)), (1, 1));
            drop(placed);
            assert_eq!((elsewhere(), cores(0)), (before, before));
        }
        assert_eq!(cores(server.id()), 1);
        server.kill().unwrap();
        server.wait().unwrap();
        drop(ask);
        other.join().unwrap();
    }
}
