//! Summary of the metrics in one line, in the format of Mooncake's master.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::rpc::RpcMethod;
use moongate_runtime::Supervisor;
use tokio::time::MissedTickBehavior;

use crate::counters::CallCounts;
use crate::server::MasterServer;

/// Interval at which the line is logged.
const INTERVAL: Duration = Duration::from_secs(10);

/// RPCs for single objects, with their names in the line.
const SINGLE: [(&str, RpcMethod); 15] = [
    ("PutStart", RpcMethod::PutStart),
    ("PutEnd", RpcMethod::PutEnd),
    ("PutRevoke", RpcMethod::PutRevoke),
    ("Get", RpcMethod::GetReplicaList),
    ("Exist", RpcMethod::ExistKey),
    ("Del", RpcMethod::Remove),
    ("DelAll", RpcMethod::RemoveAll),
    ("Ping", RpcMethod::Ping),
    ("CopyStart", RpcMethod::CopyStart),
    ("CopyEnd", RpcMethod::CopyEnd),
    ("CopyRevoke", RpcMethod::CopyRevoke),
    ("MoveStart", RpcMethod::MoveStart),
    ("MoveEnd", RpcMethod::MoveEnd),
    ("MoveRevoke", RpcMethod::MoveRevoke),
    ("EvictDiskReplica", RpcMethod::EvictDiskReplica),
];
const BATCHES: [(&str, RpcMethod); 7] = [
    ("PutStart", RpcMethod::BatchPutStart),
    ("PutEnd", RpcMethod::BatchPutEnd),
    ("PutRevoke", RpcMethod::BatchPutRevoke),
    ("Get", RpcMethod::BatchGetReplicaList),
    ("ExistKey", RpcMethod::BatchExistKey),
    ("QueryIp", RpcMethod::BatchQueryIp),
    ("Clear", RpcMethod::BatchReplicaClear),
];
const TASKS: [(&str, RpcMethod); 5] = [
    ("CreateMoveTask", RpcMethod::CreateMoveTask),
    ("CreateCopyTask", RpcMethod::CreateCopyTask),
    ("QueryTask", RpcMethod::QueryTask),
    ("FetchTasks", RpcMethod::FetchTasks),
    ("MarkTaskToComplete", RpcMethod::MarkTaskToComplete),
];

/// Generates the line. Rates cover the time since the previous line.
#[derive(Debug)]
pub struct MetricsSummary {
    server: Arc<MasterServer>,
    last: Instant,
    previous: HashMap<RpcMethod, CallCounts>,
}

#[derive(Default)]
struct CallRates {
    requests: f64,
    successes: f64,
    partial: f64,
    items: f64,
    successful_items: f64,
}

impl MetricsSummary {
    /// Starts with rates from now on.
    pub fn new(server: &Arc<MasterServer>) -> Self {
        let previous =
            RpcMethod::ALL.iter().map(|method| (*method, server.counters.call_counts(*method))).collect();
        Self { server: Arc::clone(server), last: Instant::now(), previous }
    }

    /// Generates the line from the current counters.
    pub fn text(&mut self) -> String {
        let seconds = self.last.elapsed().as_secs_f64().max(0.001);
        self.last = Instant::now();
        let leadership = self.server.leadership.load_full();
        let mut text = format!(
            "role={}, state={}, service_ready={}, master={{",
            leadership.role.name(),
            leadership.state.name(),
            leadership.is_serving()
        );
        self.state(&mut text);
        self.calls(&mut text, seconds);
        self.evictions(&mut text);
        text.push('}');
        text
    }

    fn state(&self, text: &mut String) {
        let master = &self.server.master;
        let space = master.space_usage();
        let share = if space.capacity > 0 {
            format!(" ({:.1}%)", 100.0 * space.used as f64 / space.capacity as f64)
        } else {
            String::new()
        };
        let _ = write!(
            text,
            "Mem Storage: {} / {}{share} | NVMe-oF SSD: 0 B / 0 B | SSD Storage: 0 B / 0 B | Keys: {} (soft-pinned: {}) \
             | Clients: {}",
            bytes(space.used),
            bytes(space.capacity),
            master.key_count(),
            master.soft_pinned_count(),
            master.client_counts().active
        );
    }

    fn calls(&mut self, text: &mut String, seconds: f64) {
        text.push_str(" | Requests (Success/Total per sec): ");
        self.each(text, &SINGLE, seconds, |text, name, rates| {
            let _ = write!(text, "{name}={:.2}/{:.2}", rates.successes, rates.requests);
        });
        text.push_str(" | Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): ");
        self.each(text, &BATCHES, seconds, |text, name, rates| {
            let CallRates { requests, successes, partial, items, successful_items } = rates;
            let _ = write!(
                text,
                "{name}:(Req={successes:.2}/{partial:.2}/{requests:.2}, Item={successful_items:.2}/{items:.2})"
            );
        });
        text.push_str(", ");
        self.each(text, &TASKS, seconds, |text, name, rates| {
            let _ = write!(text, "{name}:(Req={:.2}/{:.2})", rates.successes, rates.requests);
        });
    }

    fn each(
        &mut self,
        text: &mut String,
        methods: &[(&str, RpcMethod)],
        seconds: f64,
        write: impl Fn(&mut String, &str, CallRates),
    ) {
        for (index, (name, method)) in methods.iter().enumerate() {
            if index > 0 {
                text.push_str(", ");
            }
            write(text, name, self.rates(*method, seconds));
        }
    }

    fn rates(&mut self, method: RpcMethod, seconds: f64) -> CallRates {
        let now = self.server.counters.call_counts(method);
        let previous = self.previous.insert(method, now).unwrap_or_default();
        let rate = |of: fn(&CallCounts) -> u64| of(&now).saturating_sub(of(&previous)) as f64 / seconds;
        CallRates {
            requests: rate(|counts| counts.requests),
            successes: rate(|counts| {
                counts.requests.saturating_sub(counts.failures + counts.partial_successes)
            }),
            partial: rate(|counts| counts.partial_successes),
            items: rate(|counts| counts.items),
            successful_items: rate(|counts| counts.items.saturating_sub(counts.failed_items)),
        }
    }

    fn evictions(&self, text: &mut String) {
        let counts = self.server.master.statistics();
        let (rounds, keys, size) = (counts.eviction_rounds, counts.evicted_keys, bytes(counts.evicted_bytes));
        let (rejected, discarded) = (counts.allocation_failures, counts.discarded_puts);
        let _ = write!(
            text,
            " | Eviction: Success/Attempts={rounds}/{rounds}, AllocFail={rejected}, PartialAlloc=0, keys={keys}, \
             size={size} | Mem Eviction: Success/Attempts={rounds}/{rounds}, keys={keys}, size={size} | NoF Eviction: \
             Success/Attempts=0/0, keys=0, size=0 B | Discard: Released/Total={discarded}/{discarded}, StagingSize=0 B \
             | Promotion: in_flight=0, admitted=0, completed=0, failed=0, cancelled=0, expired=0, bytes=0 B, \
             rejected(freq/wm/cap)=0/0/0 | Snapshots: Success=0, Fail=0"
        );
    }
}

/// Formats a size as in Mooncake's log.
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
pub fn start(server: &Arc<MasterServer>, supervisor: &Supervisor) {
    let (mut summary, stop) = (MetricsSummary::new(server), supervisor.token());
    supervisor.spawn("summary", async move {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => tracing::info!("Master Admin Metrics: {}", summary.text()),
                () = stop.cancelled() => return,
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::CallOutcome;
    use crate::journal::MemoryJournal;
    use crate::server::MasterServerOptions;

    #[test]
    fn sizes_have_two_decimals_and_a_unit() {
        let sizes = [0, 1023, 1024, 64 << 20, 3 << 39].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.00 KB", "64.00 MB", "1.50 TB"]);
    }

    #[test]
    fn the_line_has_the_parts_that_tools_parse() {
        let server =
            Arc::new(MasterServer::new(MasterServerOptions::default(), Arc::new(MemoryJournal::new(0))));
        let mut summary = MetricsSummary::new(&server);
        server.counters.add(0, RpcMethod::ExistKey, CallOutcome::default(), Duration::ZERO);
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
