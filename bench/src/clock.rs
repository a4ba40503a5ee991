//! Meters: what a stretch of time cost, and what else the machine did meanwhile.

use nix::{time::ClockId, unistd::Pid};
use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

/// Started before the work, stopped after it.
#[derive(Debug)]
pub(crate) struct Meter {
    servers: Vec<u32>,
    began: Instant,
    client_cpu: Duration,
    server_cpu: BTreeMap<u32, Duration>,
    machine: Machine,
}

/// The reading of a [`Meter`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) took: Duration,
    /// CPU of this process, all threads.
    pub(crate) client_cpu: Duration,
    /// CPU of the server, or of all processes that together are the server; zero without any.
    pub(crate) server_cpu: Duration,
    /// The share of the machine's time that its host gave to other machines.
    pub(crate) steal: f64,
    /// The number of cores that other processes used.
    pub(crate) foreign: f64,
}

/// Ticks of all processors since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Machine {
    busy: u64,
    steal: u64,
    all: u64,
}

impl Meter {
    pub(crate) fn start(servers: &[u32]) -> Self {
        Self {
            servers: servers.to_vec(),
            machine: Machine::now(),
            server_cpu: cpu_of_each(servers),
            client_cpu: own_cpu(),
            began: Instant::now(),
        }
    }

    pub(crate) fn stop(&self) -> Seen {
        let took = self.began.elapsed();
        let client_cpu = own_cpu().saturating_sub(self.client_cpu);
        // One that has ended is not seen any more: what it used before is not taken from the others.
        let used = |(pid, cpu): (u32, Duration)| {
            let before = self.server_cpu.get(&pid).copied().unwrap_or_default();
            cpu.saturating_sub(before)
        };
        let server_cpu: Duration = cpu_of_each(&self.servers).into_iter().map(used).sum();
        let machine = Machine::now();
        let all = machine.all.saturating_sub(self.machine.all).max(1);
        let share = |ticks: u64| ticks as f64 / all as f64;
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let busy = share(machine.busy.saturating_sub(self.machine.busy)) * cores;
        let ours = (client_cpu + server_cpu).as_secs_f64() / took.as_secs_f64().max(1e-9);
        Seen {
            took,
            client_cpu,
            server_cpu,
            steal: share(machine.steal.saturating_sub(self.machine.steal)),
            foreign: (busy - ours).max(0.0),
        }
    }
}

impl Machine {
    fn now() -> Self {
        Self::read(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// `cpu user nice system idle iowait irq softirq steal …`
    fn read(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line
            .split_ascii_whitespace()
            .skip(1)
            .take(8)
            .map(|ticks| ticks.parse().unwrap_or_default())
            .collect();
        let &[user, nice, system, idle, iowait, irq, softirq, steal] = &ticks[..] else {
            return Self::default();
        };
        let busy = user + nice + system + irq + softirq;
        Self {
            busy,
            steal,
            all: busy + idle + iowait + steal,
        }
    }
}

fn own_cpu() -> Duration {
    process_cpu(std::process::id())
}

/// The CPU that processes and their children have used.
pub(crate) fn cpu_of(processes: &[u32]) -> Duration {
    cpu_of_each(processes).into_values().sum()
}

/// Some servers have a process for each connection.
fn cpu_of_each(processes: &[u32]) -> BTreeMap<u32, Duration> {
    let with_children = |pid: &u32| {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        let children = children.split_ascii_whitespace();
        let children = children.filter_map(|pid| pid.parse().ok());
        children.chain([*pid]).collect::<Vec<u32>>()
    };
    let all = processes.iter().flat_map(with_children);
    all.map(|pid| (pid, process_cpu(pid))).collect()
}

/// The CPU time of all threads that a process ever had, in nanoseconds; `/proc/PID/stat` counts in
/// ticks of 10 ms. Zero when there is no such process.
fn process_cpu(pid: u32) -> Duration {
    i32::try_from(pid)
        .ok()
        .and_then(|pid| {
            ClockId::pid_cpu_clock_id(Pid::from_raw(pid))
                .ok()?
                .now()
                .ok()
        })
        .map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::{Machine, Meter, process_cpu};
    use std::time::{Duration, Instant};

    #[test]
    fn the_first_line_of_stat_is_the_machine() {
        let stat = "cpu  100 1 20 300 5 2 3 40 7 0\ncpu0 1 2 3";
        let wanted = Machine {
            busy: 126,
            steal: 40,
            all: 471,
        };
        assert_eq!(Machine::read(stat), wanted);
        assert_eq!(Machine::read(""), Machine::default());
    }

    #[test]
    fn a_meter_sees_the_time_that_this_process_burns() {
        let meter = Meter::start(&[std::process::id()]);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
        let seen = meter.stop();
        assert!(seen.took >= Duration::from_millis(30));
        assert!(seen.client_cpu > Duration::ZERO && seen.server_cpu > Duration::ZERO);
        assert!((0.0..=1.0).contains(&seen.steal));
        assert_eq!(process_cpu(u32::MAX), Duration::ZERO);
    }
}
