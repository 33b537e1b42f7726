//! The metrics of one gateway that decisions need, from the text of its `/metrics`.

use std::collections::HashMap;

use memchr::{memchr, memchr_iter};

use crate::deployments_file::ScaledRole;

/// Most engines of one gateway, as many as a gateway lists.
const MAX_ENGINES: usize = 10_000;

/// Metrics of a gateway at one time. A metric that the text does not have is `None`.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct GatewaySample {
    pub(crate) prompt_tokens: Option<f64>,
    pub(crate) cached_tokens: Option<f64>,
    pub(crate) completion_tokens: Option<f64>,
    pub(crate) ended: EndedRequests,
    pub(crate) in_flight: Option<f64>,
    pub(crate) queued: Option<f64>,
    pub(crate) ttft: CumulativeHistogram,
    pub(crate) itl: CumulativeHistogram,
    /// Usable engines by the gateway's id.
    pub(crate) engines: HashMap<String, EngineSample>,
}

/// Requests that have ended, by how.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct EndedRequests {
    /// With a complete response.
    pub(crate) completed: f64,
    /// Without one, after an engine had started.
    pub(crate) failed: f64,
    /// For lack of engines, before one had started.
    pub(crate) rejected: f64,
    /// For a model that no engine has served since the gateway's start. Demand only if there is no engine at all.
    pub(crate) unknown_model: f64,
}

/// Counts below upper bounds, as in the text of a histogram.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct CumulativeHistogram {
    /// Upper bounds, ascending, and the number of observations up to each; the last bound is infinite.
    pub(crate) buckets: Vec<(f64, f64)>,
}

/// Load of one engine, caused by one gateway.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct EngineSample {
    pub(crate) role: Option<ScaledRole>,
    pub(crate) is_up: bool,
    pub(crate) in_flight: f64,
    pub(crate) pending_prefill_tokens: f64,
    pub(crate) active_decode_tokens: f64,
}

/// The text is not that of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the response has no metric moongate_requests_in_flight; the URL must be that of a gateway's admin listener"
)]
pub(crate) struct NotGatewayMetrics;

impl GatewaySample {
    /// Parses the OpenMetrics text of a gateway. Lines of other metrics, and lines that are not well-formed, are skipped.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, NotGatewayMetrics> {
        let mut sample = Self::default();
        let mut start = 0;
        for end in memchr_iter(b'\n', text).chain([text.len()]) {
            let line = text.get(start..end).unwrap_or_default();
            start = end + 1;
            if let Some(line) = line.strip_prefix(b"moongate_")
                && let Ok(line) = std::str::from_utf8(line)
            {
                sample.add_line(line);
            }
        }
        if sample.in_flight.is_none() { Err(NotGatewayMetrics) } else { Ok(sample) }
    }

    /// Adds a line without the prefix `moongate_`.
    fn add_line(&mut self, line: &str) {
        let Some(name_len) = line.bytes().position(|byte| byte == b'{' || byte == b' ') else { return };
        let (name, rest) = line.split_at(name_len);
        match name {
            "prompt_tokens_total" => self.prompt_tokens = value(rest),
            "cached_tokens_total" => self.cached_tokens = value(rest),
            "completion_tokens_total" => self.completion_tokens = value(rest),
            "requests_in_flight" => self.in_flight = value(rest),
            "requests_queued" => self.queued = value(rest),
            "requests_total" => {
                if let Some((labels, value)) = labelled(rest) {
                    self.ended.add(label(labels, "code").unwrap_or_default(), value);
                }
            }
            "ttft_seconds_bucket" => self.ttft.add_bucket(rest),
            "itl_seconds_bucket" => self.itl.add_bucket(rest),
            _ => {
                if let Some(engine_metric) = name.strip_prefix("engine_") {
                    self.add_engine_line(engine_metric, rest);
                }
            }
        }
    }

    fn add_engine_line(&mut self, name: &str, rest: &str) {
        if !["up", "requests_in_flight", "pending_prefill_tokens", "active_decode_tokens"].contains(&name) {
            return;
        }
        let Some((labels, value)) = labelled(rest) else { return };
        let Some(instance) = label(labels, "instance") else { return };
        if !self.engines.contains_key(instance) {
            if self.engines.len() >= MAX_ENGINES {
                return;
            }
            let role = label(labels, "role").and_then(ScaledRole::from_name);
            self.engines.insert(instance.to_owned(), EngineSample { role, ..EngineSample::default() });
        }
        let Some(engine) = self.engines.get_mut(instance) else { return };
        match name {
            "up" => engine.is_up = value > 0.0,
            "requests_in_flight" => engine.in_flight = value,
            "pending_prefill_tokens" => engine.pending_prefill_tokens = value,
            _ => engine.active_decode_tokens = value,
        }
    }
}

impl EndedRequests {
    fn add(&mut self, code: &str, count: f64) {
        match code {
            "ok" => self.completed += count,
            "client_closed" | "engine_rejected" | "prefill_failed" | "decode_failed" | "worker_failed"
            | "engine_unavailable" | "engine_timeout" | "shutting_down" => self.failed += count,
            "overloaded" | "no_engine_available" | "gateway_overloaded" | "adapter_load_failed" => {
                self.rejected += count;
            }
            "model_not_found" => self.unknown_model += count,
            // Invalid requests, and those beyond a tenant's quota, are no demand.
            _ => {}
        }
    }
}

impl CumulativeHistogram {
    fn add_bucket(&mut self, rest: &str) {
        let Some((labels, count)) = labelled(rest) else { return };
        let Some(bound) = label(labels, "le").and_then(parse_number) else { return };
        // Buckets of one series are in ascending order; those of other series have the same bounds.
        match self.buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => {
                let index = self.buckets.partition_point(|(known, _)| *known < bound);
                self.buckets.insert(index, (bound, count));
            }
        }
    }

    /// Number of all observations.
    pub(crate) fn count(&self) -> f64 {
        self.buckets.last().map_or(0.0, |(_, count)| *count)
    }

    /// The value that this share of the observations does not exceed, interpolated within its bucket; `None` without observations. Beyond the last finite bound it
    /// is that bound.
    pub(crate) fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = share * self.count();
        let (mut lower, mut below) = (0.0, 0.0);
        for &(bound, count) in self.buckets.iter().filter(|_| self.count() > 0.0) {
            if count >= wanted {
                let within = if count > below { (wanted - below) / (count - below) } else { 1.0 };
                return Some(if bound.is_finite() { lower + (bound - lower) * within } else { lower });
            }
            (lower, below) = (bound, count);
        }
        None
    }

    /// Share of the observations up to `limit`, interpolated within its bucket; `None` without observations.
    pub(crate) fn share_within(&self, limit: f64) -> Option<f64> {
        let all = self.count();
        let (mut lower, mut below) = (0.0, 0.0);
        for &(bound, count) in self.buckets.iter().filter(|_| all > 0.0) {
            if limit <= bound {
                // Observations beyond the last finite bound exceed any limit within it.
                let within = if bound.is_finite() { (limit - lower) / (bound - lower) } else { 0.0 };
                return Some((below + (count - below) * within) / all);
            }
            (lower, below) = (bound, count);
        }
        None
    }
}

/// Number at the start of the text after a name or labels. An exemplar may follow it.
fn value(rest: &str) -> Option<f64> {
    parse_number(rest.split_ascii_whitespace().next()?)
}

fn parse_number(text: &str) -> Option<f64> {
    text.parse::<f64>().ok().filter(|number| !number.is_nan())
}

/// Labels without their braces, and the value, of the text after a name.
fn labelled(rest: &str) -> Option<(&str, f64)> {
    let labels = rest.strip_prefix('{')?;
    let end = label_end(labels)?;
    Some((labels.get(..end)?, value(labels.get(end + 1..)?)?))
}

/// Position of the brace that ends the labels. Braces and escaped quotes may be in values.
fn label_end(labels: &str) -> Option<usize> {
    let bytes = labels.as_bytes();
    let mut from = 0;
    loop {
        let quote = from + memchr(b'"', bytes.get(from..)?).unwrap_or(usize::MAX - from);
        let brace = from + memchr(b'}', bytes.get(from..)?)?;
        if brace < quote {
            return Some(brace);
        }
        from = value_end(bytes, quote + 1)? + 1;
    }
}

/// Position of the quote that ends the value at `from`.
fn value_end(bytes: &[u8], mut from: usize) -> Option<usize> {
    loop {
        match bytes.get(from)? {
            b'"' => return Some(from),
            b'\\' => from += 2,
            _ => from += 1,
        }
    }
}

/// Value of a label, with its escape sequences.
fn label<'a>(labels: &'a str, wanted: &str) -> Option<&'a str> {
    let mut rest = labels;
    loop {
        let (name, after) = rest.split_once("=\"")?;
        let end = value_end(after.as_bytes(), 0)?;
        if name == wanted {
            return after.get(..end);
        }
        rest = after.get(end + 1..)?.strip_prefix(',')?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# TYPE moongate_prompt_tokens counter
moongate_prompt_tokens_total 5000
moongate_cached_tokens_total 1000
moongate_completion_tokens_total 700
moongate_requests_in_flight 4
moongate_requests_queued 2
moongate_requests_total{api="chat",code="ok"} 10
moongate_requests_total{api="completions",code="ok"} 1
moongate_requests_total{api="chat",code="overloaded"} 3
moongate_requests_total{api="chat",code="client_closed"} 2
moongate_requests_total{api="chat",code="invalid_json"} 9
moongate_ttft_seconds_sum{api="chat"} 7.5
moongate_ttft_seconds_bucket{le="0.5",api="chat"} 2 # {trace_id="4b"} 0.4
moongate_ttft_seconds_bucket{le="1.0",api="chat"} 8
moongate_ttft_seconds_bucket{le="+Inf",api="chat"} 10
moongate_ttft_seconds_bucket{le="0.5",api="completions"} 0
moongate_ttft_seconds_bucket{le="1.0",api="completions"} 0
moongate_ttft_seconds_bucket{le="+Inf",api="completions"} 0
moongate_engine_up{instance="a\"}b",role="prefill"} 1
moongate_engine_pending_prefill_tokens{instance="a\"}b",role="prefill"} 4096
moongate_engine_up{instance="c",role="decode"} 0
moongate_engine_requests_in_flight{instance="c",role="decode"} 12
moongate_engine_active_decode_tokens{instance="c",role="decode"} 9000
moongate_itl_seconds_bucket{le="nonsense"} 1
moongate_engine_connections{instance="d",role="decode"} 1
"#;

    #[test]
    fn metrics_are_summed_over_their_labels() {
        let sample = GatewaySample::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(sample.prompt_tokens, Some(5000.0));
        assert_eq!((sample.in_flight, sample.queued), (Some(4.0), Some(2.0)));
        let ended = EndedRequests { completed: 11.0, failed: 2.0, rejected: 3.0, unknown_model: 0.0 };
        assert_eq!(sample.ended, ended);
        assert_eq!(sample.ttft.buckets, [(0.5, 2.0), (1.0, 8.0), (f64::INFINITY, 10.0)]);
        assert_eq!(sample.itl.count(), 0.0);
        assert_eq!(sample.engines.len(), 2, "{:?}", sample.engines);
        let prefill = sample.engines[r#"a\"}b"#];
        assert_eq!((prefill.role, prefill.is_up), (Some(ScaledRole::Prefill), true));
        assert_eq!(prefill.pending_prefill_tokens, 4096.0);
        let decode = sample.engines["c"];
        assert_eq!((decode.is_up, decode.in_flight, decode.active_decode_tokens), (false, 12.0, 9000.0));
    }

    #[test]
    fn absent_metrics_are_missing_and_other_texts_are_rejected() {
        let sample = GatewaySample::parse(b"moongate_requests_in_flight 0").unwrap();
        assert_eq!((sample.prompt_tokens, sample.queued), (None, None));
        for text in [
            "",
            "<html>",
            "moongate_prompt_tokens_total 1\n",
            "moongate_requests_in_flight{",
            "moongate_requests_in_flight x",
        ] {
            assert_eq!(GatewaySample::parse(text.as_bytes()), Err(NotGatewayMetrics), "{text}");
        }
    }

    #[test]
    fn quantiles_and_shares_are_interpolated() {
        let histogram = CumulativeHistogram { buckets: vec![(1.0, 4.0), (2.0, 8.0), (f64::INFINITY, 10.0)] };
        let near = |value: Option<f64>, expected: f64| (value.unwrap() - expected).abs() < 1e-9;
        assert!(near(histogram.quantile(0.2), 0.5) && near(histogram.quantile(0.6), 1.5));
        assert!(near(histogram.quantile(0.95), 2.0), "beyond the last finite bound");
        assert!(near(histogram.share_within(0.5), 0.2) && near(histogram.share_within(1.5), 0.6));
        assert!(
            near(histogram.share_within(5.0), 0.8),
            "what exceeds the last finite bound exceeds the limit"
        );
        let empty = CumulativeHistogram { buckets: vec![(1.0, 0.0), (f64::INFINITY, 0.0)] };
        assert_eq!((empty.quantile(0.5), empty.share_within(0.5)), (None, None));
    }
}
