//! The plan derived from a seed.

use std::fmt;
use std::time::Duration;

use moongate_loadtest::engine::{SimProtocol, VllmConnector};

/// Number of prefill engines, and of decode engines.
pub(crate) const PAIRS: usize = 2;
pub(crate) const NODES: usize = 2;

/// Start of load and faults, after the programs have connected to each other.
const LOAD_START: Duration = Duration::from_secs(2);
const LOAD_DURATION: Duration = Duration::from_secs(5);
/// All faults have ended by this time.
pub(crate) const FAULTS_END: Duration = Duration::from_secs(8);

/// A host that can be crashed, partitioned or slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimulatedHost {
    Gateway,
    Master,
    Prefill(usize),
    Decode(usize),
    Node(usize),
    /// The store's clients. They are only partitioned.
    StoreClients,
}

impl SimulatedHost {
    /// Its name in the network.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Gateway => "gateway".to_owned(),
            Self::Master => "master".to_owned(),
            Self::Prefill(number) => format!("prefill-{number}"),
            Self::Decode(number) => format!("decode-{number}"),
            Self::Node(number) => format!("node-{number}"),
            Self::StoreClients => "objects".to_owned(),
        }
    }

    pub(crate) fn is_engine(self) -> bool {
        matches!(self, Self::Prefill(_) | Self::Decode(_))
    }
}

/// Hosts that may be partitioned.
const PARTITIONABLE_HOSTS: [SimulatedHost; 9] = [
    SimulatedHost::StoreClients,
    SimulatedHost::Gateway,
    SimulatedHost::Master,
    SimulatedHost::Prefill(0),
    SimulatedHost::Prefill(1),
    SimulatedHost::Decode(0),
    SimulatedHost::Decode(1),
    SimulatedHost::Node(0),
    SimulatedHost::Node(1),
];

pub(crate) const CRASHABLE_HOSTS: [SimulatedHost; 8] = [
    SimulatedHost::Gateway,
    SimulatedHost::Master,
    SimulatedHost::Prefill(0),
    SimulatedHost::Prefill(1),
    SimulatedHost::Decode(0),
    SimulatedHost::Decode(1),
    SimulatedHost::Node(0),
    SimulatedHost::Node(1),
];

/// A fault of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimulatedFault {
    /// The host loses its processes, which then restart.
    Crash(SimulatedHost),
    /// No message passes between the two. TCP retransmits, so they arrive when the fault ends.
    Partition(SimulatedHost, SimulatedHost),
    /// The engine is slower by this factor.
    Slow(SimulatedHost, u32),
    /// The engine accepts requests and sends no output.
    Hang(SimulatedHost),
    /// The engine interrupts streams after this many tokens.
    BreakStreams(SimulatedHost, u32),
    /// Connections of all hosts are cut at this many writes per million.
    CutConnections(u32),
}

impl SimulatedFault {
    /// Whether a store may lose objects by this fault: a node fails, or the master cannot reach it.
    fn may_lose_objects(self) -> bool {
        match self {
            Self::Crash(host) => matches!(host, SimulatedHost::Node(_)),
            Self::Partition(one, other) => {
                let is_node = |host| matches!(host, SimulatedHost::Node(_));
                one == SimulatedHost::Master && is_node(other)
                    || is_node(one) && other == SimulatedHost::Master
            }
            Self::CutConnections(_) => true,
            Self::Slow(..) | Self::Hang(_) | Self::BreakStreams(..) => false,
        }
    }
}

/// A fault with its start and end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultWindow {
    pub(crate) fault: SimulatedFault,
    pub(crate) start: Duration,
    pub(crate) end: Duration,
}

/// One request of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedRequest {
    pub(crate) at: Duration,
    pub(crate) prompt: usize,
    pub(crate) stream: bool,
}

/// One call of a store client.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StoreOperation {
    Upsert { key: usize, bytes: usize },
    Get { key: usize },
}

/// All values derived from a seed.
#[derive(Debug, Clone)]
pub(crate) struct SeedPlan {
    pub(crate) seed: u64,
    pub(crate) face: SimProtocol,
    pub(crate) connector: VllmConnector,
    /// Minimum and maximum message delay.
    pub(crate) latency: (Duration, Duration),
    /// Whether nodes store their memory in files.
    pub(crate) persistent_memory: bool,
    pub(crate) faults: Vec<FaultWindow>,
    pub(crate) requests: Vec<PlannedRequest>,
    /// For each store client: pauses and calls.
    pub(crate) operations: Vec<Vec<(Duration, StoreOperation)>>,
    /// Tokens to generate, per prompt.
    pub(crate) output_tokens: Vec<u32>,
    /// Whether the operator updates the engines' group during the run.
    pub(crate) updates: bool,
}

impl SeedPlan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let (face, connector) = match random.u8(..4) {
            0 | 1 => (SimProtocol::Sglang, VllmConnector::Nixl),
            2 => (SimProtocol::Vllm, VllmConnector::Nixl),
            _ => (SimProtocol::Vllm, VllmConnector::Mooncake),
        };
        let max_latency_ms = [5, 10, 20, 50][random.usize(..4)];
        // Some seeds have no faults: they show that normal operation meets all checks.
        let incidents = if random.u8(..8) == 0 { 0 } else { random.usize(1..=6) };
        let mut faults: Vec<FaultWindow> = (0..incidents).map(|_| incident(&mut random)).collect();
        faults.sort_by_key(|incident| incident.start);
        let output_tokens: Vec<u32> = (0..5).map(|_| random.u32(1..60)).collect();
        let requests = (0..random.usize(10..40)).map(|_| PlannedRequest {
            at: LOAD_START + LOAD_DURATION.mul_f64(random.f64()),
            prompt: random.usize(..output_tokens.len()),
            stream: random.u8(..3) > 0,
        });
        let mut requests: Vec<PlannedRequest> = requests.collect();
        requests.sort_by_key(|request| request.at);
        let operations: Vec<Vec<_>> =
            (0..3).map(|_| (0..16).map(|_| operation(&mut random)).collect()).collect();
        Self {
            seed,
            face,
            connector,
            latency: (Duration::from_millis(1), Duration::from_millis(max_latency_ms)),
            persistent_memory: random.bool(),
            faults,
            requests,
            operations,
            output_tokens,
            updates: random.u8(..3) == 0,
        }
    }

    /// Whether a store retains everything that it has acknowledged. A restart of the master must not lose objects.
    pub(crate) fn is_lossless(&self) -> bool {
        !self.faults.iter().any(|incident| incident.fault.may_lose_objects())
    }
}

fn incident(random: &mut fastrand::Rng) -> FaultWindow {
    let start = LOAD_START + LOAD_DURATION.mul_f64(random.f64());
    let end = FAULTS_END.min(start + Duration::from_millis(random.u64(50..4000)));
    let host = |random: &mut fastrand::Rng| CRASHABLE_HOSTS[random.usize(..CRASHABLE_HOSTS.len())];
    let engine = |random: &mut fastrand::Rng| CRASHABLE_HOSTS[random.usize(2..6)];
    let two = |random: &mut fastrand::Rng| {
        let one = random.usize(..PARTITIONABLE_HOSTS.len());
        let other = (one + random.usize(1..PARTITIONABLE_HOSTS.len())) % PARTITIONABLE_HOSTS.len();
        (PARTITIONABLE_HOSTS[one], PARTITIONABLE_HOSTS[other])
    };
    let fault = match random.u8(..14) {
        0..=3 => SimulatedFault::Crash(host(random)),
        4..=7 => {
            let (one, other) = two(random);
            SimulatedFault::Partition(one, other)
        }
        8 => SimulatedFault::Slow(engine(random), random.u32(2..50)),
        9 => SimulatedFault::Hang(engine(random)),
        10..=11 => SimulatedFault::BreakStreams(engine(random), random.u32(1..8)),
        _ => SimulatedFault::CutConnections(random.u32(1_000..40_000)),
    };
    FaultWindow { fault, start, end }
}

fn operation(random: &mut fastrand::Rng) -> (Duration, StoreOperation) {
    let pause = Duration::from_millis(random.u64(1..600));
    let key = random.usize(..5);
    let operation = match random.bool() {
        true => StoreOperation::Upsert { key, bytes: random.usize(64..24_000) },
        false => StoreOperation::Get { key },
    };
    (pause, operation)
}

impl fmt::Display for SeedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, face, connector, latency, persistent_memory: memory_lasts, updates, .. } = self;
        write!(
            f,
            "seed {seed}: {face:?} {connector:?}, latency {latency:?}, persistent memory: {memory_lasts}, update: {updates}"
        )?;
        for FaultWindow { fault, start, end } in &self.faults {
            write!(f, "; {fault:?} {:.3}..{:.3}", start.as_secs_f64(), end.as_secs_f64())?;
        }
        Ok(())
    }
}
