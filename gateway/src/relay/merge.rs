//! Merges the responses to `n` single samples into one. No other module parses and rewrites whole responses.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body as AxumBody;
use bytes::Bytes;
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Limited};
use serde_json::Value;

use super::stream::{RelayAborted, ResponseRelay};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::RequestRecorder;
use crate::request_body::InferenceApi;
use crate::response::ResponseSummary;

/// Most bytes of one sample's response that are buffered until all are complete.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// The response to one sample.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are the large one")]
pub(crate) enum SampleResponse {
    Complete(Bytes),
    /// A stream that has started.
    Streaming(ResponseRelay),
}

/// Joins whole responses, in the order of the samples.
pub(crate) async fn merge_complete(
    api: InferenceApi,
    samples: Vec<SampleResponse>,
) -> Result<Bytes, ApiError> {
    let mut responses = Vec::with_capacity(samples.len());
    for sample in samples {
        let bytes = match sample {
            SampleResponse::Complete(bytes) => bytes,
            SampleResponse::Streaming(relay) => {
                let body = Limited::new(AxumBody::new(relay), MAX_RESPONSE_BYTES);
                let truncated = |_| {
                    ApiError::new(
                        ApiErrorCode::DecodeFailed,
                        "the response to one of the samples was truncated",
                    )
                };
                body.collect().await.map_err(truncated)?.to_bytes()
            }
        };
        let response: Value = serde_json::from_slice(&bytes).map_err(|error| {
            ApiError::new(ApiErrorCode::DecodeFailed, format!("an engine's response is not JSON: {error}"))
        })?;
        responses.push(response);
    }
    Ok(Bytes::from(merge_bodies(api, responses).to_string()))
}

fn merge_bodies(api: InferenceApi, responses: Vec<Value>) -> Value {
    let n = responses.len() as u64;
    if api == InferenceApi::Generate {
        return Value::Array(interleave(responses.into_iter().map(as_list).collect()));
    }
    let mut totals = UsageSum::default();
    let mut lists = Vec::with_capacity(responses.len());
    let mut merged = Value::Null;
    for (sample, mut response) in (0_u64..).zip(responses) {
        totals.add(&response["usage"]);
        let mut choices = as_list(response["choices"].take());
        choices.iter_mut().for_each(|choice| renumber(choice, n, sample));
        lists.push(choices);
        if merged.is_null() {
            merged = response;
        }
    }
    merged["choices"] = Value::Array(interleave(lists));
    if let Some(usage) = totals.take() {
        merged["usage"] = usage;
    }
    merged
}

fn as_list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(list) => list,
        Value::Null => Vec::new(),
        single => vec![single],
    }
}

/// Samples of the first prompt, then of the second, and so on.
fn interleave(lists: Vec<Vec<Value>>) -> Vec<Value> {
    let prompts = lists.iter().map(Vec::len).max().unwrap_or(0);
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    (0..prompts).flat_map(|_| lists.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()).collect()
}

/// `index` of a prompt in one sample's response becomes its index among all samples of all prompts.
fn renumber(choice: &mut Value, n: u64, sample: u64) {
    let prompt = choice["index"].as_u64().unwrap_or(0);
    choice["index"] = Value::from(prompt * n + sample);
}

/// `usage` of all samples: the prompt counts once, as for an engine that runs `n` samples itself.
#[derive(Debug, Default)]
struct UsageSum {
    first: Option<Value>,
    completion_tokens: u64,
}

impl UsageSum {
    fn add(&mut self, usage: &Value) {
        if usage.is_object() {
            self.completion_tokens += usage["completion_tokens"].as_u64().unwrap_or(0);
            self.first.get_or_insert_with(|| usage.clone());
        }
    }

    fn take(&mut self) -> Option<Value> {
        let mut usage = self.first.take()?;
        usage["completion_tokens"] = self.completion_tokens.into();
        usage["total_tokens"] =
            (usage["prompt_tokens"].as_u64().unwrap_or(0) + self.completion_tokens).into();
        Some(usage)
    }
}

/// Merges the streams of all samples into one stream.
pub(crate) struct MergedStream {
    api: InferenceApi,
    samples: Vec<Option<SampleResponse>>,
    /// The sample that is polled first next time, so that no sample is favoured.
    next_sample: usize,
    /// The first sample's id, which all events get.
    id: Option<Value>,
    usage: UsageSum,
    /// The last event that carried only usage.
    usage_event: Option<Value>,
    recorder: RequestRecorder,
    ended: bool,
}

/// Creates a merged stream from the samples' streams.
pub(crate) fn merge_stream(
    api: InferenceApi,
    samples: Vec<SampleResponse>,
    recorder: RequestRecorder,
) -> MergedStream {
    let samples = samples.into_iter().map(Some).collect();
    MergedStream {
        api,
        samples,
        next_sample: 0,
        id: None,
        usage: UsageSum::default(),
        usage_event: None,
        recorder,
        ended: false,
    }
}

impl MergedStream {
    /// Rewrites the events of one chunk. An event that cannot be parsed is passed on unchanged.
    fn rewrite(&mut self, sample: usize, events: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(events.len() + 16);
        for line in events.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(payload) = line.strip_prefix(b"data:") else { continue };
            if payload.trim_ascii() == b"[DONE]" {
                continue;
            }
            match serde_json::from_slice::<Value>(payload) {
                Ok(event) => {
                    if let Some(event) = self.rewrite_event(sample, event) {
                        write_event(&mut out, &event);
                    }
                }
                Err(_) => {
                    out.extend_from_slice(line);
                    out.extend_from_slice(b"\n\n");
                }
            }
        }
        Bytes::from(out)
    }

    /// `None` for an event that is deferred to the end.
    fn rewrite_event(&mut self, sample: usize, mut event: Value) -> Option<Value> {
        let (n, sample) = (self.samples.len() as u64, sample as u64);
        if event.get("error").is_some() {
            return Some(event);
        }
        if self.api == InferenceApi::Generate {
            renumber(&mut event, n, sample);
            return Some(event);
        }
        if let Some(id) = event.get_mut("id") {
            *id = self.id.get_or_insert_with(|| id.clone()).clone();
        }
        let choices = event["choices"].as_array_mut()?;
        if choices.is_empty() {
            self.usage.add(&event["usage"]);
            self.usage_event = Some(event);
            return None;
        }
        choices.iter_mut().for_each(|choice| renumber(choice, n, sample));
        Some(event)
    }

    fn last_events(&mut self) -> Bytes {
        let mut out = Vec::new();
        if let (Some(mut event), Some(usage)) = (self.usage_event.take(), self.usage.take()) {
            event["usage"] = usage;
            let text = event.to_string();
            let summary = ResponseSummary::read(text.as_bytes());
            self.recorder.completed(summary.usage, None, &[], |finish| finish.add(&summary));
            write_event(&mut out, &event);
        } else {
            self.recorder.completed(None, None, &[], |_| ());
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        Bytes::from(out)
    }
}

fn write_event(out: &mut Vec<u8>, event: &Value) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(event.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

impl Body for MergedStream {
    type Data = Bytes;
    type Error = RelayAborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayAborted>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let count = self.samples.len();
        let mut running = 0;
        for step in 0..count {
            let index = (self.next_sample + step) % count;
            loop {
                let chunk = match self.samples[index].as_mut() {
                    None => break,
                    Some(SampleResponse::Complete(bytes)) => {
                        let bytes = std::mem::take(bytes);
                        self.samples[index] = None;
                        bytes
                    }
                    Some(SampleResponse::Streaming(relay)) => match Pin::new(relay).poll_frame(cx) {
                        Poll::Pending => {
                            running += 1;
                            break;
                        }
                        Poll::Ready(None) => {
                            self.samples[index] = None;
                            break;
                        }
                        Poll::Ready(Some(Err(truncated))) => {
                            self.recorder.failed(&ApiError::new(
                                ApiErrorCode::DecodeFailed,
                                "a sample's stream failed",
                            ));
                            self.samples.clear();
                            self.ended = true;
                            return Poll::Ready(Some(Err(truncated)));
                        }
                        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
                    },
                };
                let out = self.rewrite(index, &chunk);
                if !out.is_empty() {
                    self.next_sample = (index + 1) % count;
                    self.recorder.record_chunk();
                    return Poll::Ready(Some(Ok(Frame::data(out))));
                }
            }
        }
        if running > 0 {
            return Poll::Pending;
        }
        self.ended = true;
        Poll::Ready(Some(Ok(Frame::data(self.last_events()))))
    }
}

impl fmt::Debug for MergedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MergedStream").field("samples", &self.samples).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn choices_are_numbered_by_prompt_then_sample() {
        let response = |text: &str, tokens: u64| {
            json!({"id": text, "choices": [{"index": 0, "text": format!("{text}0")}, {"index": 1, "text": format!("{text}1")}],
                "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}})
        };
        let merged = merge_bodies(InferenceApi::Completions, vec![response("a", 2), response("b", 3)]);
        let expected = json!({"id": "a", "choices": [
            {"index": 0, "text": "a0"}, {"index": 1, "text": "b0"}, {"index": 2, "text": "a1"}, {"index": 3, "text": "b1"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}});
        assert_eq!(merged, expected);
    }

    #[test]
    fn generate_gives_a_list() {
        let merged = merge_bodies(InferenceApi::Generate, vec![json!({"text": "a"}), json!({"text": "b"})]);
        assert_eq!(merged, json!([{"text": "a"}, {"text": "b"}]));
    }
}
