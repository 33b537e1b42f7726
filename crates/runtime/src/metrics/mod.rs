//! Metrics of long-running commands. Each is registered or written under its whole name, as queries use it, so that a name in a query
//! is found in the code.

mod prometheus_text;
mod writer;

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry, Unit};

pub use writer::{HistogramSnapshot, MetricsWriter};

use crate::log_output::log_lines_dropped;
use crate::supervisor::task_panics;

/// Ends the samples of counters; OpenMetrics does not count it as part of the family's name.
const TOTAL: &str = "_total";

/// All metrics of a process, including those that every command has.
#[derive(Debug)]
pub struct MetricsRegistry(Registry);

impl Default for MetricsRegistry {
    fn default() -> Self {
        let mut registry = Self(Registry::default());
        registry.collect(write_process_metrics);
        registry
    }
}

impl MetricsRegistry {
    /// Registers a metric, and returns it. The name of a counter ends in `_total`; the help has no full stop at its end.
    pub fn register<M: Metric + TypedMetric + Clone>(
        &mut self,
        name: &'static str,
        help: &'static str,
        metric: M,
    ) -> M {
        let family = FamilyName::parse(name, M::TYPE);
        match family.unit {
            Some(unit) => self.0.register_with_unit(family.base, help, unit, metric.clone()),
            None => self.0.register(family.base, help, metric.clone()),
        }
        metric
    }

    /// Registers metrics that are read at each scrape.
    pub fn collect(&mut self, write: impl Fn(&mut MetricsWriter<'_>) + Send + Sync + 'static) {
        self.0.register_collector(Box::new(WriterCollector(write)));
    }

    /// The metrics in the text format of OpenMetrics 1.0.
    #[must_use]
    pub fn open_metrics(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _infallible = encode(&mut text, &self.0);
        text
    }

    /// The metrics in Prometheus' text format 0.0.4, which has no exemplars: none may be registered.
    #[must_use]
    pub fn prometheus_text(&self) -> String {
        prometheus_text::from_open_metrics(&self.open_metrics())
    }
}

/// Adapts a function to prometheus-client's trait.
struct WriterCollector<F>(F);

impl<F> fmt::Debug for WriterCollector<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("WriterCollector")
    }
}

impl<F: Fn(&mut MetricsWriter<'_>) + Send + Sync + 'static> Collector for WriterCollector<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = MetricsWriter::new(encoder);
        (self.0)(&mut writer);
        writer.finish()
    }
}

/// The parts of a metric's name that prometheus-client joins.
struct FamilyName<'n> {
    base: &'n str,
    unit: Option<Unit>,
}

impl<'n> FamilyName<'n> {
    fn parse(name: &'n str, kind: MetricType) -> Self {
        let family = match kind {
            MetricType::Counter => name.strip_suffix(TOTAL).unwrap_or(name),
            _ => name,
        };
        for unit in [Unit::Seconds, Unit::Bytes] {
            if let Some(base) = family.strip_suffix(unit.as_str()).and_then(|family| family.strip_suffix('_'))
            {
                return Self { base, unit: Some(unit) };
            }
        }
        Self { base: family, unit: None }
    }
}

fn write_process_metrics(writer: &mut MetricsWriter<'_>) {
    writer.counter(
        "moongate_log_lines_lost_total",
        "Log lines that could not be written to standard error (no reader, disk full, reader stopped)",
        log_lines_dropped(),
    );
    writer.counter(
        "moongate_task_panics_total",
        "Tasks that panicked. The log has the task's name at level ERROR",
        task_panics(),
    );
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    fn registry() -> MetricsRegistry {
        let mut registry = MetricsRegistry(Registry::default());
        registry.register("requests_total", "Requests", Counter::<u64>::default()).inc();
        registry.register("memory_bytes", "Memory", Gauge::<i64>::default()).set(2);
        registry.collect(|writer| {
            writer.counter("reads_", "Reads", 3_u64);
            writer.counter_by("writes_total", "Writes", "result", [("done", 4_u64), ("a \"b\"", 5)]);
            writer.gauge_by::<&str, u64>("empty", "Empty", "label", []);
            let buckets = vec![(0.5, 6), (f64::INFINITY, 7)];
            let snapshot = HistogramSnapshot { buckets, sum: 8.0 };
            writer.histogram_by("wait_seconds", "Waiting", "side", [("left", snapshot)]);
        });
        registry
    }

    #[test]
    fn open_metrics_has_families_without_suffix() {
        let expected = "# HELP requests Requests.\n# TYPE requests counter\nrequests_total 1\n\
            # HELP memory_bytes Memory.\n# TYPE memory_bytes gauge\n# UNIT memory_bytes bytes\nmemory_bytes 2\n\
            # HELP reads_ Reads.\n# TYPE reads_ unknown\nreads_ 3\n\
            # HELP writes Writes.\n# TYPE writes counter\nwrites_total{result=\"done\"} 4\nwrites_total{result=\"a \\\"b\\\"\"} 5\n\
            # HELP empty Empty.\n# TYPE empty gauge\n\
            # HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n# UNIT wait_seconds seconds\n\
            wait_seconds_sum{side=\"left\"} 8.0\nwait_seconds_count{side=\"left\"} 13\n\
            wait_seconds_bucket{le=\"0.5\",side=\"left\"} 6\nwait_seconds_bucket{le=\"+Inf\",side=\"left\"} 13\n# EOF\n";
        assert_eq!(registry().open_metrics(), expected);
    }

    #[test]
    fn prometheus_text_has_families_with_their_whole_names() {
        let expected = "# HELP requests_total Requests.\n# TYPE requests_total counter\nrequests_total 1\n\
            # HELP memory_bytes Memory.\n# TYPE memory_bytes gauge\nmemory_bytes 2\n\
            # HELP reads_ Reads.\n# TYPE reads_ counter\nreads_ 3\n\
            # HELP writes_total Writes.\n# TYPE writes_total counter\nwrites_total{result=\"done\"} 4\nwrites_total{result=\"a \\\"b\\\"\"} 5\n\
            # HELP empty Empty.\n# TYPE empty gauge\n\
            # HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n\
            wait_seconds_sum{side=\"left\"} 8.0\nwait_seconds_count{side=\"left\"} 13\n\
            wait_seconds_bucket{le=\"0.5\",side=\"left\"} 6\nwait_seconds_bucket{le=\"+Inf\",side=\"left\"} 13\n";
        assert_eq!(registry().prometheus_text(), expected);
    }

    #[test]
    fn every_registry_has_the_metrics_of_the_process() {
        let text = MetricsRegistry::default().open_metrics();
        assert!(
            text.contains("# TYPE moongate_log_lines_lost counter\nmoongate_log_lines_lost_total "),
            "{text}"
        );
        assert!(text.contains("\nmoongate_task_panics_total "), "{text}");
    }
}
