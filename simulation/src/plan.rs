//! What a seed decides.

use std::fmt;
use std::time::Duration;

use moongate_loadtest::engine::{Connector, Face};

/// Prefill engines, and as many decode engines.
pub(crate) const PAIRS: usize = 2;
/// Store nodes.
pub(crate) const NODES: usize = 2;

/// When load and faults begin, after the programs have found each other.
const BEGIN: Duration = Duration::from_secs(2);
/// How long requests are sent.
const LOAD: Duration = Duration::from_secs(5);
/// The last fault is over by then.
pub(crate) const CALM: Duration = Duration::from_secs(8);

/// A host that can be crashed, cut off or slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Gateway,
    Master,
    Prefill(usize),
    Decode(usize),
    Node(usize),
    /// The store's clients. They are only cut off.
    Objects,
}

impl Host {
    /// Its name in the network.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Gateway => "gateway".to_owned(),
            Self::Master => "master".to_owned(),
            Self::Prefill(number) => format!("prefill-{number}"),
            Self::Decode(number) => format!("decode-{number}"),
            Self::Node(number) => format!("node-{number}"),
            Self::Objects => "objects".to_owned(),
        }
    }

    pub(crate) fn is_engine(self) -> bool {
        matches!(self, Self::Prefill(_) | Self::Decode(_))
    }
}

/// Who may be cut off.
const CONNECTED: [Host; 9] = [
    Host::Objects,
    Host::Gateway,
    Host::Master,
    Host::Prefill(0),
    Host::Prefill(1),
    Host::Decode(0),
    Host::Decode(1),
    Host::Node(0),
    Host::Node(1),
];

/// Who may crash.
pub(crate) const HOSTS: [Host; 8] = [
    Host::Gateway,
    Host::Master,
    Host::Prefill(0),
    Host::Prefill(1),
    Host::Decode(0),
    Host::Decode(1),
    Host::Node(0),
    Host::Node(1),
];

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The host loses its processes, and they start again.
    Crash(Host),
    /// Messages between the two are lost.
    Partition(Host, Host),
    /// Messages between the two wait, and arrive then.
    Hold(Host, Host),
    /// The engine is that many times slower.
    Slow(Host, u32),
    /// The engine takes requests and sends no output.
    Hang(Host),
    /// The engine breaks streams off after so many tokens.
    BreakStreams(Host, u32),
    /// Connections of all hosts are cut: of a million writes so many.
    CutConnections(u32),
}

impl Fault {
    /// Whether a store may lose objects by it: a node fails, or the master cannot reach it.
    fn may_lose_objects(self) -> bool {
        match self {
            Self::Crash(host) => matches!(host, Host::Node(_)),
            Self::Partition(one, other) | Self::Hold(one, other) => {
                let is_node = |host| matches!(host, Host::Node(_));
                one == Host::Master && is_node(other) || is_node(one) && other == Host::Master
            }
            Self::CutConnections(_) => true,
            Self::Slow(..) | Self::Hang(_) | Self::BreakStreams(..) => false,
        }
    }
}

/// A fault, and when it begins and ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incident {
    pub(crate) fault: Fault,
    pub(crate) begin: Duration,
    pub(crate) end: Duration,
}

/// A request of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) at: Duration,
    /// Which prompt.
    pub(crate) prompt: usize,
    pub(crate) stream: bool,
}

/// A call of a store client.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    Upsert { key: usize, bytes: usize },
    Get { key: usize },
}

/// All that a seed decides.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) face: Face,
    pub(crate) connector: Connector,
    /// Delays of messages, least and most.
    pub(crate) latency: (Duration, Duration),
    /// Whether nodes keep their memory in files.
    pub(crate) memory_lasts: bool,
    pub(crate) incidents: Vec<Incident>,
    pub(crate) requests: Vec<Request>,
    /// Of each store client: pauses and calls.
    pub(crate) operations: Vec<Vec<(Duration, Operation)>>,
    /// Tokens to generate, per prompt.
    pub(crate) lengths: Vec<u32>,
    /// Whether the operator updates the engines' group meanwhile.
    pub(crate) updates: bool,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let (face, connector) = match random.u8(..4) {
            0 | 1 => (Face::Sglang, Connector::Nixl),
            2 => (Face::Vllm, Connector::Nixl),
            _ => (Face::Vllm, Connector::Mooncake),
        };
        let most = [5, 10, 20, 50][random.usize(..4)];
        // Some seeds have no faults: they show that nothing else depends on them.
        let incidents = if random.u8(..8) == 0 { 0 } else { random.usize(1..=6) };
        let mut incidents: Vec<Incident> = (0..incidents).map(|_| incident(&mut random)).collect();
        incidents.sort_by_key(|incident| incident.begin);
        let lengths: Vec<u32> = (0..5).map(|_| random.u32(1..60)).collect();
        let requests = (0..random.usize(10..40)).map(|_| Request {
            at: BEGIN + LOAD.mul_f64(random.f64()),
            prompt: random.usize(..lengths.len()),
            stream: random.u8(..3) > 0,
        });
        let mut requests: Vec<Request> = requests.collect();
        requests.sort_by_key(|request| request.at);
        let operations: Vec<Vec<_>> =
            (0..3).map(|_| (0..16).map(|_| operation(&mut random)).collect()).collect();
        Self {
            seed,
            face,
            connector,
            latency: (Duration::from_millis(1), Duration::from_millis(most)),
            memory_lasts: random.bool(),
            incidents,
            requests,
            operations,
            lengths,
            updates: random.u8(..3) == 0,
        }
    }

    /// Whether a store keeps all that it has acknowledged. A master that restarts does.
    pub(crate) fn is_lossless(&self) -> bool {
        !self.incidents.iter().any(|incident| incident.fault.may_lose_objects())
    }
}

fn incident(random: &mut fastrand::Rng) -> Incident {
    let begin = BEGIN + LOAD.mul_f64(random.f64());
    let end = CALM.min(begin + Duration::from_millis(random.u64(50..4000)));
    let host = |random: &mut fastrand::Rng| HOSTS[random.usize(..HOSTS.len())];
    let engine = |random: &mut fastrand::Rng| HOSTS[random.usize(2..6)];
    let two = |random: &mut fastrand::Rng| {
        let one = random.usize(..CONNECTED.len());
        let other = (one + random.usize(1..CONNECTED.len())) % CONNECTED.len();
        (CONNECTED[one], CONNECTED[other])
    };
    let fault = match random.u8(..14) {
        0..=3 => Fault::Crash(host(random)),
        4..=5 => {
            let (one, other) = two(random);
            Fault::Partition(one, other)
        }
        6..=7 => {
            let (one, other) = two(random);
            Fault::Hold(one, other)
        }
        8 => Fault::Slow(engine(random), random.u32(2..50)),
        9 => Fault::Hang(engine(random)),
        10..=11 => Fault::BreakStreams(engine(random), random.u32(1..8)),
        _ => Fault::CutConnections(random.u32(1_000..40_000)),
    };
    Incident { fault, begin, end }
}

fn operation(random: &mut fastrand::Rng) -> (Duration, Operation) {
    let pause = Duration::from_millis(random.u64(1..600));
    let key = random.usize(..5);
    let operation = match random.bool() {
        true => Operation::Upsert { key, bytes: random.usize(64..24_000) },
        false => Operation::Get { key },
    };
    (pause, operation)
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, face, connector, latency, memory_lasts, updates, .. } = self;
        write!(
            f,
            "seed {seed}: {face:?} {connector:?}, latency {latency:?}, memory lasts: {memory_lasts}, update: {updates}"
        )?;
        for Incident { fault, begin, end } in &self.incidents {
            write!(f, "; {fault:?} {:.3}..{:.3}", begin.as_secs_f64(), end.as_secs_f64())?;
        }
        Ok(())
    }
}
