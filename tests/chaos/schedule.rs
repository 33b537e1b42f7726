//! What goes wrong when: made from a seed, so that a run can be repeated.

use std::time::Duration;

/// A process that faults meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ChaosTarget {
    Gateway,
    Engine(usize),
    Master,
    Store(usize),
}

/// A connection that goes through a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ProxiedLink {
    /// From the gateway to an engine.
    Engine(usize),
    /// From a store, or a client of it, to the master.
    Master,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChaosFault {
    /// `kill -9`; started again at the end.
    Kill(ChaosTarget),
    /// SIGSTOP; SIGCONT at the end.
    Stop(ChaosTarget),
    /// Connections are closed, and new ones too.
    Cut(ProxiedLink),
    /// A link with 16 KiB per second.
    Slow(ProxiedLink),
    /// The disk of the master's log is full.
    DiskFull,
}

/// A fault and its time, counted from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScheduledFault {
    pub(crate) at: Duration,
    pub(crate) lasts: Duration,
    pub(crate) fault: ChaosFault,
}

pub(crate) const ENGINES: usize = 4;
pub(crate) const STORES: usize = 2;

/// The faults of a run of so long, in order of time. All are over at its end.
pub(crate) fn schedule(seed: u64, run: Duration) -> Vec<ScheduledFault> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut faults, mut at) = (Vec::new(), Duration::from_secs(1));
    while at + Duration::from_secs(4) < run {
        let fault = match random.u32(..100) {
            0..20 => ChaosFault::Kill(ChaosTarget::Engine(random.usize(..ENGINES))),
            20..30 => ChaosFault::Kill(ChaosTarget::Master),
            30..40 => ChaosFault::Kill(ChaosTarget::Store(random.usize(..STORES))),
            40..55 => ChaosFault::Stop(ChaosTarget::Engine(random.usize(..ENGINES))),
            55..60 => ChaosFault::Stop(ChaosTarget::Master),
            60..65 => ChaosFault::Stop(ChaosTarget::Store(random.usize(..STORES))),
            65..68 => ChaosFault::Stop(ChaosTarget::Gateway),
            68..80 => ChaosFault::Cut(ProxiedLink::Engine(random.usize(..ENGINES))),
            80..84 => ChaosFault::Cut(ProxiedLink::Master),
            84..92 => ChaosFault::Slow(ProxiedLink::Engine(random.usize(..ENGINES))),
            92..96 => ChaosFault::Slow(ProxiedLink::Master),
            _ => ChaosFault::DiskFull,
        };
        let lasts = Duration::from_millis(random.u64(200..3000));
        faults.push(ScheduledFault { at, lasts, fault });
        at += Duration::from_millis(random.u64(300..2000));
    }
    faults
}

#[test]
fn a_seed_gives_one_schedule() {
    let run = Duration::from_secs(600);
    assert_eq!(schedule(7, run), schedule(7, run));
    assert_ne!(schedule(7, run), schedule(8, run));
    assert!(schedule(7, run).iter().all(|fault| fault.at + fault.lasts < run));
}
