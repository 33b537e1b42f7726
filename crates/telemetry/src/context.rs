//! Whose trace a request belongs to, in headers: <https://www.w3.org/TR/trace-context/>.

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceId, TraceState};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The caller's span. `None` without a `traceparent`, or with one that is malformed.
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

/// Names a span as the parent of whoever gets `headers`. Every leg of every request does, sampled or not, so it is done by hand: the
/// propagator would make a context for it first.
pub fn inject(headers: &mut HeaderMap, (trace, span): (TraceId, SpanId), sampled: bool, state: &TraceState) {
    let mut parent = *b"00-00000000000000000000000000000000-0000000000000000-00";
    hex(&trace.to_bytes(), &mut parent[3..35]);
    hex(&span.to_bytes(), &mut parent[36..52]);
    parent[54] = if sampled { b'1' } else { b'0' };
    // It is cloned with the other headers, for which this is one piece of memory and not two.
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

/// Most requests have neither of ours and few others: looking through the names is quicker than looking one up.
fn contains_header(headers: &HeaderMap, wanted: &HeaderName) -> bool {
    headers.keys().any(|name| name == wanted)
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

    fn of(parent: &str) -> Option<SpanContext> {
        let parent = HeaderValue::from_str(parent).unwrap();
        caller(&HeaderMap::from_iter([
            (TRACEPARENT, parent),
            (TRACESTATE, HeaderValue::from_static("a=1,b=2")),
        ]))
    }

    #[test]
    fn what_is_read_is_what_is_written() {
        for sampled in [false, true] {
            let parent = format!("00-{TRACE}-{SPAN}-0{}", u8::from(sampled));
            let context = of(&parent).unwrap();
            assert_eq!(context.is_sampled(), sampled);
            let mut headers = HeaderMap::new();
            let ids = (context.trace_id(), context.span_id());
            inject(&mut headers, ids, sampled, context.trace_state());
            assert_eq!(headers[TRACEPARENT], parent);
            assert_eq!(headers[TRACESTATE], "a=1,b=2");
        }
    }

    #[test]
    fn a_state_of_no_trace_is_not_passed_on() {
        let (trace, span) = (TraceId::from_hex(TRACE).unwrap(), SpanId::from_hex(SPAN).unwrap());
        let mut headers = HeaderMap::from_iter([(TRACESTATE, HeaderValue::from_static("a=1"))]);
        inject(&mut headers, (trace, span), false, &TraceState::NONE);
        assert!(headers.contains_key(TRACEPARENT) && !headers.contains_key(TRACESTATE));
    }

    #[test]
    fn malformed_parents_are_none() {
        assert!(caller(&HeaderMap::new()).is_none());
        let zeros = format!("00-{}-{SPAN}-01", "0".repeat(32));
        for parent in ["", "00", "garbage", "00-xyz-abc-01", zeros.as_str(), "ff-1-2-3"] {
            assert!(of(parent).is_none(), "{parent}");
        }
    }
}
