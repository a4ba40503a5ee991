//! Plan of the attacks on workers, server and network: the same for the same seed.

use super::work::millis;
use fastrand::Rng;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Attack {
    /// SIGKILL; a new process replaces it.
    KillWorker(usize),
    /// SIGSTOP.
    StopWorker(usize),
    /// SIGCONT.
    ContinueWorker(usize),
    KillServer,
    StartServer,
    StopServer,
    ContinueServer,
    /// Every connection is closed.
    Cut,
    /// No bytes pass, connections stay open.
    Silence,
    EndSilence,
}

/// The attacks during this time, in order. Only a server that the storm started is attacked.
pub(crate) fn plan(
    seed: u64,
    span: Duration,
    workers: usize,
    server: bool,
) -> Vec<(Duration, Attack)> {
    let mut rng = Rng::with_seed(seed);
    let mut attacks = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += millis(&mut rng, 100..1_500);
        if at >= span {
            break;
        }
        let worker = rng.usize(..workers);
        if rng.u8(..3) == 0 {
            attacks.push((at, Attack::KillWorker(worker)));
        } else {
            attacks.push((at, Attack::StopWorker(worker)));
            // Often shorter than a lease, sometimes longer than two.
            let longest = [300, 2_000, 5_000][rng.usize(..3)];
            attacks.push((
                at + millis(&mut rng, 20..longest),
                Attack::ContinueWorker(worker),
            ));
        }
    }
    let mut at = if server { Duration::ZERO } else { span };
    loop {
        at += millis(&mut rng, 2_000..8_000);
        let until = at + millis(&mut rng, 50..4_000);
        if until >= span {
            break;
        }
        match rng.u8(..4) {
            0 => attacks.extend([(at, Attack::KillServer), (until, Attack::StartServer)]),
            1 => attacks.extend([(at, Attack::StopServer), (until, Attack::ContinueServer)]),
            2 => attacks.extend([(at, Attack::Silence), (until, Attack::EndSilence)]),
            _ => attacks.push((at, Attack::Cut)),
        }
        at = until;
    }
    attacks.sort();
    attacks
}

#[cfg(test)]
mod tests {
    use super::{Attack, plan};
    use std::time::Duration;

    #[test]
    fn a_seed_has_one_plan_and_another_seed_another() {
        let of = |seed| plan(seed, Duration::from_secs(60), 4, true);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn a_server_of_others_is_left_alone() {
        let attacks = plan(1, Duration::from_secs(600), 4, false);
        assert!(attacks.len() > 100);
        for (_, attack) in attacks {
            use Attack::{ContinueWorker, KillWorker, StopWorker};
            assert!(
                matches!(
                    attack,
                    KillWorker(0..4) | StopWorker(0..4) | ContinueWorker(0..4)
                ),
                "{attack:?}"
            );
        }
    }
}
