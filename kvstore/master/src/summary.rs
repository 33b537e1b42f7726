//! The most important figures in one line, as Mooncake's master logs them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::rpc::Method;
use moongate_runtime::Supervisor;
use tokio::time::MissedTickBehavior;

use crate::count::CallCounts;
use crate::server::Server;

/// How often the line is logged.
const EVERY: Duration = Duration::from_secs(10);

/// What single calls are told, and under which name.
const SINGLE: [(&str, Method); 15] = [
    ("PutStart", Method::PutStart),
    ("PutEnd", Method::PutEnd),
    ("PutRevoke", Method::PutRevoke),
    ("Get", Method::GetReplicaList),
    ("Exist", Method::ExistKey),
    ("Del", Method::Remove),
    ("DelAll", Method::RemoveAll),
    ("Ping", Method::Ping),
    ("CopyStart", Method::CopyStart),
    ("CopyEnd", Method::CopyEnd),
    ("CopyRevoke", Method::CopyRevoke),
    ("MoveStart", Method::MoveStart),
    ("MoveEnd", Method::MoveEnd),
    ("MoveRevoke", Method::MoveRevoke),
    ("EvictDiskReplica", Method::EvictDiskReplica),
];
const BATCHES: [(&str, Method); 7] = [
    ("PutStart", Method::BatchPutStart),
    ("PutEnd", Method::BatchPutEnd),
    ("PutRevoke", Method::BatchPutRevoke),
    ("Get", Method::BatchGetReplicaList),
    ("ExistKey", Method::BatchExistKey),
    ("QueryIp", Method::BatchQueryIp),
    ("Clear", Method::BatchReplicaClear),
];
const TASKS: [(&str, Method); 5] = [
    ("CreateMoveTask", Method::CreateMoveTask),
    ("CreateCopyTask", Method::CreateCopyTask),
    ("QueryTask", Method::QueryTask),
    ("FetchTasks", Method::FetchTasks),
    ("MarkTaskToComplete", Method::MarkTaskToComplete),
];

/// Makes the line. Rates are those since the last time.
#[derive(Debug)]
pub struct Summary {
    server: Arc<Server>,
    last: Instant,
    before: HashMap<Method, CallCounts>,
}

/// Figures a second.
#[derive(Default)]
struct Rates {
    requests: f64,
    successes: f64,
    partial: f64,
    items: f64,
    good_items: f64,
}

impl Summary {
    /// Rates begin now.
    pub fn new(server: &Arc<Server>) -> Self {
        let before = Method::ALL.iter().map(|method| (*method, server.counters.of(*method))).collect();
        Self { server: Arc::clone(server), last: Instant::now(), before }
    }

    /// The line.
    pub fn text(&mut self) -> String {
        let seconds = self.last.elapsed().as_secs_f64().max(0.001);
        self.last = Instant::now();
        let standing = self.server.standing.load_full();
        let mut text = format!(
            "role={}, state={}, service_ready={}, master={{",
            standing.role.name(),
            standing.state.name(),
            standing.is_serving()
        );
        self.state(&mut text);
        self.calls(&mut text, seconds);
        self.evictions(&mut text);
        text.push('}');
        text
    }

    fn state(&self, text: &mut String) {
        let master = &self.server.master;
        let fill = master.fill();
        let share = if fill.capacity > 0 {
            format!(" ({:.1}%)", 100.0 * fill.used as f64 / fill.capacity as f64)
        } else {
            String::new()
        };
        let _ = write!(
            text,
            "Mem Storage: {} / {}{share} | NVMe-oF SSD: 0 B / 0 B | SSD Storage: 0 B / 0 B | Keys: {} (soft-pinned: {}) \
             | Clients: {}",
            bytes(fill.used),
            bytes(fill.capacity),
            master.key_count(),
            master.soft_pinned_count(),
            master.client_counts().0
        );
    }

    fn calls(&mut self, text: &mut String, seconds: f64) {
        text.push_str(" | Requests (Success/Total per sec): ");
        self.each(text, &SINGLE, seconds, |text, name, it| {
            let _ = write!(text, "{name}={:.2}/{:.2}", it.successes, it.requests);
        });
        text.push_str(" | Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): ");
        self.each(text, &BATCHES, seconds, |text, name, it| {
            let Rates { requests, successes, partial, items, good_items } = it;
            let _ = write!(
                text,
                "{name}:(Req={successes:.2}/{partial:.2}/{requests:.2}, Item={good_items:.2}/{items:.2})"
            );
        });
        text.push_str(", ");
        self.each(text, &TASKS, seconds, |text, name, it| {
            let _ = write!(text, "{name}:(Req={:.2}/{:.2})", it.successes, it.requests);
        });
    }

    fn each(
        &mut self,
        text: &mut String,
        methods: &[(&str, Method)],
        seconds: f64,
        write: impl Fn(&mut String, &str, Rates),
    ) {
        for (at, (name, method)) in methods.iter().enumerate() {
            if at > 0 {
                text.push_str(", ");
            }
            write(text, name, self.rates(*method, seconds));
        }
    }

    fn rates(&mut self, method: Method, seconds: f64) -> Rates {
        let now = self.server.counters.of(method);
        let before = self.before.insert(method, now).unwrap_or_default();
        let rate = |of: fn(&CallCounts) -> u64| of(&now).saturating_sub(of(&before)) as f64 / seconds;
        Rates {
            requests: rate(|it| it.requests),
            successes: rate(|it| it.requests.saturating_sub(it.failures + it.partial_successes)),
            partial: rate(|it| it.partial_successes),
            items: rate(|it| it.items),
            good_items: rate(|it| it.items.saturating_sub(it.failed_items)),
        }
    }

    fn evictions(&self, text: &mut String) {
        let counts = self.server.master.counts();
        let (rounds, keys, size) = (counts.eviction_rounds, counts.evicted_keys, bytes(counts.evicted_bytes));
        let (refused, discarded) = (counts.allocation_failures, counts.discarded_puts);
        let _ = write!(
            text,
            " | Eviction: Success/Attempts={rounds}/{rounds}, AllocFail={refused}, PartialAlloc=0, keys={keys}, \
             size={size} | Mem Eviction: Success/Attempts={rounds}/{rounds}, keys={keys}, size={size} | NoF Eviction: \
             Success/Attempts=0/0, keys=0, size=0 B | Discard: Released/Total={discarded}/{discarded}, StagingSize=0 B \
             | Promotion: in_flight=0, admitted=0, completed=0, failed=0, cancelled=0, expired=0, bytes=0 B, \
             rejected(freq/wm/cap)=0/0/0 | Snapshots: Success=0, Fail=0"
        );
    }
}

/// Bytes for people, in Mooncake's form.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KB", "MB", "GB", "TB", "PB"];
    let (mut value, mut unit) = (bytes as f64, None);
    for name in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, Some(name));
    }
    unit.map_or_else(|| format!("{bytes} B"), |unit| format!("{value:.2} {unit}"))
}

/// Logs the line every ten seconds until the supervisor's shutdown.
pub fn start(server: &Arc<Server>, supervisor: &Supervisor) {
    let (mut summary, stop) = (Summary::new(server), supervisor.token());
    supervisor.spawn("summary", async move {
        let mut times = tokio::time::interval(EVERY);
        times.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = times.tick() => tracing::info!("Master Admin Metrics: {}", summary.text()),
                () = stop.cancelled() => return,
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::count::Tally;
    use crate::journal::MemoryJournal;
    use crate::server::ServerOptions;

    #[test]
    fn sizes() {
        let sizes = [0, 1023, 1024, 64 << 20, 3 << 39].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.00 KB", "64.00 MB", "1.50 TB"]);
    }

    #[test]
    fn the_line_has_the_parts_that_tools_look_for() {
        let server = Arc::new(Server::new(ServerOptions::default(), Arc::new(MemoryJournal::new(0))));
        let mut summary = Summary::new(&server);
        server.counters.add(0, Method::ExistKey, Tally::default(), Duration::ZERO);
        let line = summary.text();
        for part in [
            "role=standby, state=starting, service_ready=false, master={Mem Storage: 0 B / 0 B | ",
            "| Keys: 0 (soft-pinned: 0) | Clients: 0 | Requests (Success/Total per sec): PutStart=0.00/0.00, ",
            "PutStart:(Req=0.00/0.00/0.00, Item=0.00/0.00), ",
            "MarkTaskToComplete:(Req=0.00/0.00) | Eviction: Success/Attempts=0/0, ",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains("Exist=0.00/0.00"), "{line}");
        assert!(summary.text().contains("Exist=0.00/0.00"));
    }
}
