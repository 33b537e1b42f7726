use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId};
use opentelemetry::{KeyValue, StringValue};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Read;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue as ReadPair};
use opentelemetry_proto::tonic::trace::v1::Span;
use proptest::prelude::*;
use prost::Message as _;

use super::*;

const KEYS: [&str; 3] = ["a", "gen_ai.request.model", "moongate.predicted.l1_tokens"];

fn trace(state: TraceState) -> Arc<Trace> {
    Trace::new(TraceId::from(7), state, None, Arc::default())
}

fn record(id: u64, name: String) -> Record {
    Record {
        id: SpanId::from(id),
        parent: SpanId::from(id - 1),
        is_root: id == 1,
        kind: SpanKind::Client,
        name: Cow::Owned(name),
        start: SystemTime::UNIX_EPOCH + Duration::from_nanos(id),
        end: SystemTime::UNIX_EPOCH + Duration::from_nanos(1 << 60),
    }
}

fn read(trace: &Trace, written: &Spans) -> Vec<Span> {
    let mut bytes = Vec::new();
    spans(&mut bytes, trace, written);
    let name = Value::from("moongate");
    let exported = Exported::by([("service.name", &name)].into_iter(), ("code", "1.2"));
    let request = exported.request(&[0; 5], &bytes);
    assert_eq!(request[..5], [0; 5]);
    let mut request = ExportTraceServiceRequest::decode(&request[5..]).unwrap();
    let mut resource_spans = request.resource_spans.remove(0);
    assert!(request.resource_spans.is_empty());
    let resource = resource_spans.resource.unwrap().attributes;
    assert_eq!(resource, [pair("service.name", &name)]);
    let scope_spans = resource_spans.scope_spans.remove(0);
    let scope = scope_spans.scope.unwrap();
    assert_eq!((scope.name.as_str(), scope.version.as_str()), ("code", "1.2"));
    scope_spans.spans
}

fn pair(key: &str, value: &Value) -> ReadPair {
    ReadPair { key: key.to_owned(), value: Some(as_read(value)), key_strindex: 0 }
}

fn as_read(value: &Value) -> AnyValue {
    let array =
        |values: Vec<Value>| Read::ArrayValue(ArrayValue { values: values.iter().map(as_read).collect() });
    let value = match value {
        Value::Bool(value) => Read::BoolValue(*value),
        Value::I64(value) => Read::IntValue(*value),
        Value::F64(value) => Read::DoubleValue(*value),
        Value::String(value) => Read::StringValue(value.to_string()),
        Value::Array(Array::Bool(values)) => array(values.iter().map(|one| Value::from(*one)).collect()),
        Value::Array(Array::I64(values)) => array(values.iter().map(|one| Value::from(*one)).collect()),
        Value::Array(Array::F64(values)) => array(values.iter().map(|one| Value::from(*one)).collect()),
        Value::Array(Array::String(values)) => array(values.iter().cloned().map(Value::from).collect()),
        other => panic!("{other:?}"),
    };
    AnyValue { value: Some(value) }
}

fn value() -> impl Strategy<Value = Value> {
    let text = "\\PC{0,200}".prop_map(StringValue::from);
    prop_oneof![
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::I64),
        (-1e9..1e9).prop_map(Value::F64),
        text.clone().prop_map(Value::String),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(|values| Value::Array(Array::Bool(values))),
        prop::collection::vec(any::<i64>(), 0..9).prop_map(|values| Value::Array(Array::I64(values))),
        prop::collection::vec(-1e9..1e9, 0..9).prop_map(|values| Value::Array(Array::F64(values))),
        prop::collection::vec(text, 0..9).prop_map(|values| Value::Array(Array::String(values))),
    ]
}

/// Up to so many that their message has a length of three bytes.
fn pairs() -> impl Strategy<Value = Vec<(&'static str, Value)>> {
    prop::collection::vec((prop::sample::select(&KEYS), value()), 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read(at_once in pairs(), later in pairs(), of_event in pairs(), name in "\\PC{0,40}") {
        let records = vec![record(1, name.clone()), record(2, String::new())];
        let mut written = Spans { records, notes: Vec::new() };
        let (first, second) = (SpanId::from(1), SpanId::from(2));
        for (key, value) in &at_once {
            written.notes.push((first, Note::Attribute(key, value.clone())));
            written.notes.push((second, Note::Attribute("of another", value.clone())));
        }
        let told = later.clone();
        let tell = move |notes: &mut Notes| told.iter().for_each(|(key, value)| notes.set(key, value.clone()));
        written.notes.push((first, Note::Later(Arc::new(tell))));
        let attributes = of_event.iter().map(|(key, value)| KeyValue::new(*key, value.clone())).collect();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        written.notes.push((first, Note::Event(Box::new(Event { name: "aborted", time, attributes }))));

        let trace = trace(TraceState::NONE);
        let all = read(&trace, &written);
        prop_assert_eq!(all.len(), 2);
        prop_assert_eq!(&all[0].name, &name);
        let expected: Vec<_> = at_once.iter().chain(&later).map(|(key, value)| pair(key, value)).collect();
        prop_assert_eq!(&all[0].attributes, &expected);
        let event = &all[0].events[0];
        let expected: Vec<_> = of_event.iter().map(|(key, value)| pair(key, value)).collect();
        prop_assert_eq!(&event.attributes, &expected);
        prop_assert_eq!((event.name.as_str(), event.time_unix_nano), ("aborted", 5_000_000_000));
        prop_assert_eq!(all[1].attributes.len(), at_once.len());
        prop_assert!(all[1].events.is_empty());
    }
}

#[test]
fn a_span_says_who_it_is_and_how_it_ended() {
    let state = TraceState::from_key_value([("vendor", "opaque")]).unwrap();
    let trace = trace(state);
    let other =
        SpanContext::new(TraceId::from(8), SpanId::from(9), TraceFlags::SAMPLED, false, TraceState::NONE);
    let records = vec![record(1, "root".to_owned()), record(2, "child".to_owned())];
    let notes = vec![
        (SpanId::from(2), Note::Link(Box::new(other))),
        (SpanId::from(2), Note::Error(Cow::Borrowed("refused"))),
    ];
    let written = Spans { records, notes };
    let all = read(&trace, &written);
    let (root, child) = (&all[0], &all[1]);
    assert_eq!(root.trace_id, TraceId::from(7).to_bytes());
    assert_eq!(root.trace_state, "vendor=opaque");
    assert_eq!((root.parent_span_id.as_slice(), root.status.as_ref()), ([].as_slice(), None));
    assert_eq!(child.parent_span_id, root.span_id);
    assert_eq!(
        (child.kind, child.flags, child.start_time_unix_nano, child.end_time_unix_nano),
        (3, 0x101, 2, 1 << 60)
    );
    assert_eq!(child.links[0].trace_id, TraceId::from(8).to_bytes());
    assert_eq!(child.links[0].span_id, SpanId::from(9).to_bytes());
    let status = child.status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "refused"));
}

#[test]
fn long_text_is_cut_between_characters() {
    let long = "é".repeat(MAX_TEXT);
    let notes = vec![(SpanId::from(1), Note::Attribute("path", format!("a{long}").into()))];
    let written = Spans { records: vec![record(1, long)], notes };
    let span = read(&trace(TraceState::NONE), &written).remove(0);
    assert_eq!(span.name, "é".repeat(MAX_TEXT / 2));
    let Some(Read::StringValue(path)) = span.attributes[0].value.clone().unwrap().value else { panic!() };
    assert_eq!(path.len(), MAX_TEXT - 1);
}
