//! Metric names of another gateway, so that its dashboards and alerts keep working after a migration.

use clap::ValueEnum;

use super::GatewayMetrics;

/// The gateway whose metric names are exported in addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MetricAliases {
    /// smg 1.13, the SGLang model gateway.
    Smg,
}

impl MetricAliases {
    /// Registers the metrics a second time.
    pub(super) fn register(self, metrics: &mut GatewayMetrics) {
        match self {
            Self::Smg => register_smg(metrics),
        }
    }
}

/// Registers smg's families of the same type, unit and meaning. Their labels are Moongate's.
fn register_smg(metrics: &mut GatewayMetrics) {
    let registry = &mut metrics.registry;
    registry.register(
        "smg_admission_inflight",
        "Same as `moongate_requests_in_flight`",
        metrics.in_flight.clone(),
    );
    registry.register(
        "smg_admission_queue_depth",
        "Same as `moongate_requests_queued`",
        metrics.requests_queued.clone(),
    );
    registry.register(
        "smg_http_request_duration_seconds",
        "Same as `moongate_request_duration_seconds`",
        metrics.durations.family.clone(),
    );
    registry.register(
        "smg_http_responses_total",
        "Same as `moongate_requests_total`",
        metrics.requests.clone(),
    );
    registry.register("smg_kv_index_blocks", "Same as `moongate_index_blocks`", metrics.index_blocks.clone());
    registry.register("smg_pd_ttft_seconds", "Same as `moongate_ttft_seconds`", metrics.ttft.family.clone());
    registry.register(
        "smg_router_request_duration_seconds",
        "Same as `moongate_request_duration_seconds`",
        metrics.durations.family.clone(),
    );
    registry.register(
        "smg_router_requests_total",
        "Same as `moongate_requests_total`",
        metrics.requests.clone(),
    );
    registry.register(
        "smg_router_ttft_seconds",
        "Same as `moongate_ttft_seconds`",
        metrics.ttft.family.clone(),
    );
    registry.register(
        "smg_scheduler_queue_depth",
        "Same as `moongate_requests_queued`",
        metrics.requests_queued.clone(),
    );
    registry.register(
        "smg_scheduler_queue_wait_seconds",
        "Same as `moongate_queue_wait_seconds`",
        metrics.queue_wait.clone(),
    );
    registry.register(
        "smg_worker_cb_state",
        "Same as `moongate_engine_breaker_open`",
        metrics.engines.breaker_open.clone(),
    );
    registry.register(
        "smg_worker_connections_active",
        "Same as `moongate_engine_connections`",
        metrics.engines.connections.clone(),
    );
    registry.register("smg_worker_health", "Same as `moongate_engine_up`", metrics.engines.up.clone());
    registry.register(
        "smg_worker_requests_active",
        "Same as `moongate_engine_requests_in_flight`",
        metrics.engines.in_flight.clone(),
    );
    registry.register(
        "smg_worker_retries_total",
        "Same as `moongate_retries_total`",
        metrics.legs.retries.clone(),
    );
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    use super::super::engines::EngineLabels;
    use super::*;
    use crate::request_body::InferenceApi;
    use crate::upstream::LegKind;

    /// The samples of each family: what follows its name, up to the exemplar.
    fn families(text: &str) -> BTreeMap<&str, BTreeSet<&str>> {
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let of_family = |name: &str| {
            let samples = text.lines().filter(|line| !line.starts_with('#'));
            let samples = samples.filter_map(|line| line.split(" # ").next()?.strip_prefix(name));
            let suffixes = ["_total", "_bucket", "_sum", "_count", ""];
            let is_of_family = |sample: &&str| {
                suffixes.iter().any(|suffix| {
                    sample.strip_prefix(suffix).is_some_and(|rest| rest.starts_with([' ', '{']))
                })
            };
            samples.filter(is_of_family).collect()
        };
        names.map(|name| (name, of_family(name))).collect()
    }

    #[test]
    fn alias_has_the_samples_of_its_family() {
        let metrics = GatewayMetrics::new(Some(MetricAliases::Smg));
        metrics.init_all_series();
        for (family, value) in metrics.engines.families().into_iter().zip(11..) {
            family
                .get_or_create(&EngineLabels { instance: "a".to_owned(), role: "decode".to_owned() })
                .set(value);
        }
        metrics.in_flight.set(19);
        metrics.requests_queued.set(20);
        metrics.index_blocks.set(21);
        metrics.record_queue_wait(Duration::from_secs(3));
        metrics.legs.record_retry(LegKind::Decode);
        metrics.first_token(InferenceApi::Chat, Duration::from_secs(1), None);
        metrics.request_ended(InferenceApi::Chat, "ok", Duration::from_secs(2), None);
        let text = metrics.text();
        let families = families(&text);
        let targets = text.lines().filter_map(|line| {
            let (alias, help) = line.strip_prefix("# HELP ")?.split_once(' ')?;
            let target = help.strip_prefix("Same as `")?.strip_suffix("`.")?;
            Some((alias, target.strip_suffix("_total").unwrap_or(target)))
        });
        let mut aliases = 0;
        for (alias, target) in targets {
            assert!(!families[target].is_empty(), "{target}");
            assert_eq!(families[alias], families[target], "{alias}");
            let kind = |name: &str| text.split_once(&format!("# TYPE {name} ")).unwrap().1.split('\n').next();
            assert_eq!(kind(alias), kind(target), "{alias}");
            aliases += 1;
        }
        assert_eq!(aliases, 16);
    }
}
