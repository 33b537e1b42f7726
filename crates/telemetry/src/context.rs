//! W3C trace context in HTTP headers: <https://www.w3.org/TR/trace-context/>.

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceId, TraceState};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// What all spans of a trace share, in this process and others.
#[derive(Debug, Clone)]
pub(crate) struct TraceContext {
    pub(crate) id: TraceId,
    pub(crate) state: TraceState,
    /// Sampling decision, propagated to every callee.
    pub(crate) sampled: bool,
}

/// The caller's span. `None` if `traceparent` is missing or malformed.
#[must_use]
pub fn caller(headers: &HeaderMap) -> Option<SpanContext> {
    if !contains_header(headers, &TRACEPARENT) {
        return None;
    }
    let propagator = TraceContextPropagator::new();
    let context = propagator.extract_with_context(&Context::new(), &HeaderExtractor(headers));
    let caller = context.span().span_context().clone();
    caller.is_valid().then_some(caller)
}

/// Sets a span as the parent for the receiver of `headers`. This runs for every leg of every request, sampled or not, so it is written by
/// hand: the propagator would first create a context.
pub fn inject(headers: &mut HeaderMap, (trace, span): (TraceId, SpanId), sampled: bool, state: &TraceState) {
    let mut parent = *b"00-00000000000000000000000000000000-0000000000000000-00";
    hex(&trace.to_bytes(), &mut parent[3..35]);
    hex(&span.to_bytes(), &mut parent[36..52]);
    parent[54] = if sampled { b'1' } else { b'0' };
    // The value is cloned with the other headers; as a shared buffer it needs one allocation instead of two.
    let Ok(parent) = HeaderValue::from_maybe_shared(Bytes::from_owner(parent)) else { return };
    headers.insert(TRACEPARENT, parent);
    if *state == TraceState::NONE {
        if contains_header(headers, &TRACESTATE) {
            headers.remove(TRACESTATE);
        }
    } else if let Ok(state) = HeaderValue::try_from(state.header()) {
        headers.insert(TRACESTATE, state);
    }
}

/// Most requests have neither header and few others: scanning the names is faster than a lookup.
fn contains_header(headers: &HeaderMap, expected: &HeaderName) -> bool {
    headers.keys().any(|name| name == expected)
}

fn hex(bytes: &[u8], digits: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (byte, pair) in bytes.iter().zip(digits.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn caller_of(parent: &str) -> Option<SpanContext> {
        let parent = HeaderValue::from_str(parent).unwrap();
        caller(&HeaderMap::from_iter([
            (TRACEPARENT, parent),
            (TRACESTATE, HeaderValue::from_static("a=1,b=2")),
        ]))
    }

    #[test]
    fn injected_headers_match_the_extracted_context() {
        for sampled in [false, true] {
            let parent = format!("00-{TRACE}-{SPAN}-0{}", u8::from(sampled));
            let context = caller_of(&parent).unwrap();
            assert_eq!(context.is_sampled(), sampled);
            let mut headers = HeaderMap::new();
            let ids = (context.trace_id(), context.span_id());
            inject(&mut headers, ids, sampled, context.trace_state());
            assert_eq!(headers[TRACEPARENT], parent);
            assert_eq!(headers[TRACESTATE], "a=1,b=2");
        }
    }

    #[test]
    fn a_tracestate_without_a_trace_is_removed() {
        let (trace, span) = (TraceId::from_hex(TRACE).unwrap(), SpanId::from_hex(SPAN).unwrap());
        let mut headers = HeaderMap::from_iter([(TRACESTATE, HeaderValue::from_static("a=1"))]);
        inject(&mut headers, (trace, span), false, &TraceState::NONE);
        assert!(headers.contains_key(TRACEPARENT) && !headers.contains_key(TRACESTATE));
    }

    #[test]
    fn malformed_parents_are_ignored() {
        assert!(caller(&HeaderMap::new()).is_none());
        let zeros = format!("00-{}-{SPAN}-01", "0".repeat(32));
        for parent in ["", "00", "garbage", "00-xyz-abc-01", zeros.as_str(), "ff-1-2-3"] {
            assert!(caller_of(parent).is_none(), "{parent}");
        }
    }
}
