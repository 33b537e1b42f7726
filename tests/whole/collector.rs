//! The spans that a cluster sends, and views of them.

use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use moongate_testkit::collector::{TestCollector, attribute_text, hex};
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::{Mutex, MutexGuard};

use super::host::HOST;

const FIRST_TOKEN: &str = "gen_ai.response.time_to_first_chunk";

/// A collector that retains all spans.
pub(crate) struct SpanCollector {
    receiver: Mutex<TestCollector>,
    spans: Mutex<Vec<Span>>,
}

impl SpanCollector {
    /// Starts one; answers with where pods reach it.
    pub(crate) async fn start() -> (Self, String) {
        let receiver = TestCollector::start_at((HOST, 0)).await;
        let endpoint = receiver.endpoint.clone();
        (Self { receiver: Mutex::new(receiver), spans: Mutex::default() }, endpoint)
    }

    fn spans(&self) -> MutexGuard<'_, Vec<Span>> {
        let mut spans = self.spans.lock();
        spans.extend(self.receiver.lock().spans());
        spans
    }

    /// The trace of the request that took longest until its first token, of those that began in this time.
    pub(crate) fn slowest(&self, when: Range<SystemTime>) -> Vec<Span> {
        let nanoseconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let when = nanoseconds(when.start)..nanoseconds(when.end);
        let time = |span: &Span| attribute_text(&span.attributes, FIRST_TOKEN).parse::<f64>().ok();
        let spans = self.spans();
        let within = spans.iter().filter(|span| when.contains(&u128::from(span.start_time_unix_nano)));
        let timed = within.filter_map(|span| time(span).map(|time| (time, hex(&span.trace_id))));
        let slowest = timed.max_by(|(one, _), (other, _)| one.total_cmp(other));
        drop(spans);
        slowest.map(|(_, id)| self.trace(&id)).unwrap_or_default()
    }

    /// All spans of a trace, in the order of their beginnings.
    pub(crate) fn trace(&self, id: &str) -> Vec<Span> {
        let mut spans: Vec<Span> =
            self.spans().iter().filter(|span| hex(&span.trace_id) == id).cloned().collect();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }
}

/// A trace for people: when each span began, how long it took and what it says.
pub(crate) fn shown(spans: &[Span]) -> String {
    let begun = spans.first().map_or(0, |span| span.start_time_unix_nano);
    let line = |span: &Span| {
        let after = Duration::from_nanos(span.start_time_unix_nano - begun);
        let took = Duration::from_nanos(span.end_time_unix_nano - span.start_time_unix_nano);
        let keys = span.attributes.iter().map(|attribute| attribute.key.as_str());
        let said: Vec<String> =
            keys.map(|key| format!("{key}={}", attribute_text(&span.attributes, key))).collect();
        format!("{:28} at {after:.1?} for {took:.1?}: {}\n", span.name, said.join(" "))
    };
    spans.iter().map(line).collect()
}
