use std::borrow::Cow;
use std::time::Duration;

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Read;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue as ReadPair};
use opentelemetry_proto::tonic::trace::v1::Span;
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::annotations::SpanAnnotation;
use crate::span_attributes::{AttributeWriter, SpanAttributes};
use crate::span_record::SpanRecord;

const KEYS: [&str; 3] = ["a", "gen_ai.request.model", "moongate.predicted.l1_tokens"];

fn trace(state: TraceState) -> TraceContext {
    TraceContext { id: TraceId::from(7), state, sampled: true }
}

/// A record that ends `id` nanoseconds after `start`.
fn record<T>(id: u64, name: String, start: Instant, attributes: T) -> Box<SpanRecord<T>> {
    Box::new(SpanRecord {
        id: SpanId::from(id),
        parent: SpanId::from(id - 1),
        is_root: id == 1,
        kind: SpanKind::Client,
        name: Cow::Owned(name),
        start,
        end: Some(start + Duration::from_nanos(id)),
        annotations: Vec::new(),
        attributes,
    })
}

fn read(trace: &TraceContext, records: &[Box<SpanRecord>]) -> Vec<Span> {
    let mut encoder = SpanEncoder::new(0);
    records.iter().for_each(|record| record.encode(trace, &mut encoder));
    assert_eq!(encoder.spans(), records.len());
    let spans = encoder.into_bytes();
    let envelope =
        OtlpEnvelope::new([("service.name", AttributeValue::from("moongate"))].into_iter(), ("code", "1.2"));
    let request = [envelope.prefix(spans.len()), spans.to_vec()].concat();
    let mut request = ExportTraceServiceRequest::decode(&*request).unwrap();
    let mut resource_spans = request.resource_spans.remove(0);
    assert!(request.resource_spans.is_empty());
    let resource = resource_spans.resource.unwrap().attributes;
    assert_eq!(resource, [pair("service.name", &AttributeValue::from("moongate"))]);
    let scope_spans = resource_spans.scope_spans.remove(0);
    let scope = scope_spans.scope.unwrap();
    assert_eq!((scope.name.as_str(), scope.version.as_str()), ("code", "1.2"));
    scope_spans.spans
}

fn any_value(value: &AttributeValue<'_>) -> AnyValue {
    let value = match value {
        AttributeValue::Bool(value) => Read::BoolValue(*value),
        AttributeValue::Integer(value) => Read::IntValue(*value),
        AttributeValue::Float(value) => Read::DoubleValue(*value),
        AttributeValue::Text(value) => Read::StringValue(value.to_string()),
    };
    AnyValue { value: Some(value) }
}

fn pair(key: &str, value: &AttributeValue<'_>) -> ReadPair {
    ReadPair { key: key.to_owned(), value: Some(any_value(value)), key_strindex: 0 }
}

fn value() -> impl Strategy<Value = AttributeValue<'static>> {
    prop_oneof![
        any::<bool>().prop_map(AttributeValue::Bool),
        any::<i64>().prop_map(AttributeValue::Integer),
        (-1e9..1e9).prop_map(AttributeValue::Float),
        "\\PC{0,200}".prop_map(AttributeValue::from),
    ]
}

/// Attribute lists whose message may need a length of three bytes.
fn pairs() -> impl Strategy<Value = Vec<(&'static str, AttributeValue<'static>)>> {
    prop::collection::vec((prop::sample::select(&KEYS), value()), 0..120)
}

/// Test attributes, including one with a list value.
struct TestAttributes {
    pairs: Vec<(&'static str, AttributeValue<'static>)>,
    list: Vec<AttributeValue<'static>>,
}

impl SpanAttributes for TestAttributes {
    fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        self.pairs.iter().for_each(|(key, value)| attributes.set(key, value.clone()));
        attributes.list("list", self.list.iter().cloned());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn encoded_attributes_and_events_are_decoded(annotations in pairs(), later in pairs(), list in prop::collection::vec(value(), 0..120), name in "\\PC{0,40}") {
        let now = Instant::now();
        let attributes = TestAttributes { pairs: later.clone(), list: list.clone() };
        let mut first = record(1, name.clone(), now, attributes);
        let mut second = record(2, String::new(), now, ());
        for (key, value) in &annotations {
            first.annotations.push(SpanAnnotation::Attribute(key, value.clone()));
            second.annotations.push(SpanAnnotation::Attribute("of another", value.clone()));
        }
        second.annotations.push(SpanAnnotation::Event("aborted", now + Duration::from_secs(5)));

        let trace = trace(TraceState::NONE);
        let decoded = read(&trace, &[first, second]);
        prop_assert_eq!(decoded.len(), 2);
        prop_assert_eq!(&decoded[0].name, &name);
        let mut expected: Vec<_> = annotations.iter().chain(&later).map(|(key, value)| pair(key, value)).collect();
        let list = Read::ArrayValue(ArrayValue { values: list.iter().map(any_value).collect() });
        let list = Some(AnyValue { value: Some(list) });
        expected.push(ReadPair { key: "list".to_owned(), value: list, key_strindex: 0 });
        prop_assert_eq!(&decoded[0].attributes, &expected);
        prop_assert!(decoded[0].events.is_empty());
        prop_assert_eq!(decoded[1].attributes.len(), annotations.len());
        let event = &decoded[1].events[0];
        let after = event.time_unix_nano - decoded[1].start_time_unix_nano;
        prop_assert_eq!((event.name.as_str(), after), ("aborted", 5_000_000_000));
    }
}

struct TestSpanLink(SpanContext);

impl SpanAttributes for TestSpanLink {
    fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        attributes.link(&self.0);
    }
}

#[test]
fn identity_times_links_and_status_are_encoded() {
    let state = TraceState::from_key_value([("vendor", "opaque")]).unwrap();
    let trace = trace(state);
    let other =
        SpanContext::new(TraceId::from(8), SpanId::from(9), TraceFlags::SAMPLED, false, TraceState::NONE);
    let now = Instant::now();
    let mut child = record(2, "child".to_owned(), now, TestSpanLink(other));
    child.annotations = vec![SpanAnnotation::Error(Cow::Borrowed("refused"))];
    let decoded = read(&trace, &[record(1, "root".to_owned(), now, ()), child]);
    let (root, child) = (&decoded[0], &decoded[1]);
    assert_eq!(root.trace_id, TraceId::from(7).to_bytes());
    assert_eq!(root.trace_state, "vendor=opaque");
    assert_eq!((root.parent_span_id.as_slice(), root.status.as_ref()), ([].as_slice(), None));
    assert_eq!(child.parent_span_id, root.span_id);
    assert_eq!((child.kind, child.flags), (3, 0x101));
    assert_eq!(child.start_time_unix_nano, root.start_time_unix_nano);
    assert_eq!(child.end_time_unix_nano - child.start_time_unix_nano, 2);
    assert_eq!(child.links[0].trace_id, TraceId::from(8).to_bytes());
    assert_eq!(child.links[0].span_id, SpanId::from(9).to_bytes());
    let status = child.status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "refused"));
}

#[test]
fn long_text_is_truncated_at_a_character_boundary() {
    let long = "é".repeat(MAX_TEXT_BYTES);
    let mut record = record(1, long.clone(), Instant::now(), ());
    record.annotations.push(SpanAnnotation::Attribute("path", format!("a{long}").into()));
    let span = read(&trace(TraceState::NONE), &[record]).remove(0);
    assert_eq!(span.name, "é".repeat(MAX_TEXT_BYTES / 2));
    let Some(Read::StringValue(path)) = span.attributes[0].value.clone().unwrap().value else { panic!() };
    assert_eq!(path.len(), MAX_TEXT_BYTES - 1);
}
