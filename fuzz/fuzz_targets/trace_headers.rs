//! A caller's trace context is forwarded unchanged or not at all; an export has exactly the listed headers.
//!
//! The input's lines are `traceparent`, `tracestate`, and the list of headers for exports.

#![no_main]

use clap::Parser;
use http::header::{HeaderMap, HeaderValue};
use libfuzzer_sys::fuzz_target;
use moongate_telemetry::{TelemetryArgs, caller, inject};

#[derive(Parser)]
struct TraceHeadersFuzzArgs {
    #[command(flatten)]
    telemetry: TelemetryArgs,
}

fn check_context(parent: &[u8], state: &[u8]) {
    let mut headers = HeaderMap::new();
    for (name, value) in [("traceparent", parent), ("tracestate", state)] {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(name, value);
        }
    }
    let Some(context) = caller(&headers) else { return };
    assert!(context.is_valid());
    let mut passed_on = HeaderMap::new();
    let ids = (context.trace_id(), context.span_id());
    inject(&mut passed_on, ids, context.is_sampled(), context.trace_state());
    let again = caller(&passed_on).expect("our own headers");
    assert_eq!((again.trace_id(), again.span_id()), ids);
    assert_eq!((again.is_sampled(), again.trace_state()), (context.is_sampled(), context.trace_state()));
}

fn check_export_headers(list: &str) {
    let argument = format!("--otlp-headers={list}");
    let Ok(command) = TraceHeadersFuzzArgs::try_parse_from(["fuzz", argument.as_str()]) else { return };
    let headers = command.telemetry.otlp_headers.unwrap_or_default();
    let pairs = list.split(',').filter(|pair| !pair.trim().is_empty()).count();
    assert_eq!(headers.len(), pairs);
    assert!(headers.values().all(HeaderValue::is_sensitive));
}

fuzz_target!(|input: &[u8]| {
    let mut lines = input.splitn(3, |byte| *byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    check_context(line(), line());
    if let Ok(list) = std::str::from_utf8(line()) {
        check_export_headers(list);
    }
});
