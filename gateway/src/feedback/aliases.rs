//! Metric names of another gateway, so that its dashboards and alerts keep working after a migration.

use std::fmt::Write as _;

use clap::ValueEnum;

/// The gateway whose metric names are exported in addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MetricAliases {
    /// smg 1.13, the SGLang model gateway.
    Smg,
}

/// smg's families and the families here with the same type, unit and meaning; labels are Moongate's.
const SMG: [(&str, &str); 16] = [
    ("smg_admission_inflight", "moongate_requests_in_flight"),
    ("smg_admission_queue_depth", "moongate_requests_queued"),
    ("smg_http_request_duration_seconds", "moongate_request_duration_seconds"),
    ("smg_http_responses", "moongate_requests"),
    ("smg_kv_index_blocks", "moongate_index_blocks"),
    ("smg_pd_ttft_seconds", "moongate_ttft_seconds"),
    ("smg_router_request_duration_seconds", "moongate_request_duration_seconds"),
    ("smg_router_requests", "moongate_requests"),
    ("smg_router_ttft_seconds", "moongate_ttft_seconds"),
    ("smg_scheduler_queue_depth", "moongate_requests_queued"),
    ("smg_scheduler_queue_wait_seconds", "moongate_queue_wait_seconds"),
    ("smg_worker_cb_state", "moongate_engine_breaker_open"),
    ("smg_worker_connections_active", "moongate_engine_connections"),
    ("smg_worker_health", "moongate_engine_up"),
    ("smg_worker_requests_active", "moongate_engine_requests_in_flight"),
    ("smg_worker_retries", "moongate_retries"),
];

/// Suffixes that OpenMetrics adds to a family's name in its samples.
const SUFFIXES: [&str; 5] = ["", "_total", "_bucket", "_sum", "_count"];
/// Last line of an OpenMetrics exposition.
const EOF: &str = "# EOF\n";

impl MetricAliases {
    /// Each alias with the family that it stands for.
    #[must_use]
    pub fn table(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Smg => &SMG,
        }
    }

    /// Adds the aliases to the text of a scrape.
    pub(super) fn add(self, text: &mut String) {
        if text.ends_with(EOF) {
            text.truncate(text.len() - EOF.len());
        }
        let own = std::mem::take(text);
        for (alias, family) in self.table() {
            for (before, after) in own.lines().filter_map(|line| split_at_family(line, family)) {
                let _infallible = writeln!(text, "{before}{alias}{after}");
            }
        }
        text.insert_str(0, &own);
        text.push_str(EOF);
    }
}

/// Text of the line before and after the family's name; `None` for a line of another family.
fn split_at_family<'a>(line: &'a str, family: &str) -> Option<(&'a str, &'a str)> {
    let comment = ["# HELP ", "# TYPE ", "# UNIT "].into_iter().find(|comment| line.starts_with(comment));
    let (before, rest) = line.split_at(comment.map_or(0, str::len));
    let after = rest.strip_prefix(family)?;
    let ends = |suffix: &str| after.strip_prefix(suffix).is_some_and(|rest| rest.starts_with([' ', '{']));
    SUFFIXES.into_iter().any(ends).then_some((before, after))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::feedback::all_metrics;

    /// Values of a text's samples, by name and labels.
    fn samples(text: &str) -> BTreeMap<&str, &str> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| line.split(" # ").next()?.rsplit_once(' ')).collect()
    }

    #[test]
    fn alias_has_all_samples_of_its_family_and_nothing_changes() {
        // Distinct values identify the samples.
        let mut own = String::new();
        for (number, line) in all_metrics().lines().enumerate() {
            let sample = line.split(" # ").next().unwrap();
            match sample.rsplit_once(' ') {
                Some((name, _)) if !line.starts_with('#') => writeln!(own, "{name} {number}").unwrap(),
                _ => writeln!(own, "{line}").unwrap(),
            }
        }
        let mut text = own.clone();
        MetricAliases::Smg.add(&mut text);
        assert!(text.starts_with(own.trim_end_matches(EOF)) && text.ends_with(EOF));
        assert_eq!(text.matches(EOF).count(), 1);
        let (all, own_samples) = (samples(&text), samples(&own));
        let mut added = 0;
        for (alias, family) in SMG {
            let of_family: Vec<_> = own_samples
                .iter()
                .filter(|(name, _)| split_at_family(&format!("{name} "), family).is_some())
                .collect();
            assert!(!of_family.is_empty(), "there is no {family}");
            for (name, value) in &of_family {
                assert_eq!(
                    all.get(name.replacen(family, alias, 1).as_str()),
                    Some(*value),
                    "{alias}, {name}"
                );
            }
            added += of_family.len();
            for comment in ["HELP", "TYPE"] {
                let line = |name: &str| format!("# {comment} {name} ");
                assert_eq!(text.matches(&line(alias)).count(), own.matches(&line(family)).count());
            }
        }
        assert_eq!(all.len(), own_samples.len() + added);
    }

    #[test]
    fn families_with_longer_names_are_others() {
        assert_eq!(split_at_family("moongate_requests_queued 3", "moongate_requests"), None);
        assert_eq!(
            split_at_family("moongate_requests_total{a=\"b\"} 3", "moongate_requests"),
            Some(("", "_total{a=\"b\"} 3"))
        );
        assert_eq!(
            split_at_family("# TYPE moongate_requests counter", "moongate_requests"),
            Some(("# TYPE ", " counter"))
        );
        assert_eq!(split_at_family("# TYPE moongate_requests_queued gauge", "moongate_requests"), None);
    }
}
