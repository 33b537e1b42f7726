//! Sends one request, reads its event stream to the end and measures it.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::json;

use super::measurements::{RequestFailure, RequestMeasurement};

/// Maximum size of an event in bytes.
const MAX_EVENT_BYTES: usize = 16 * 1024 * 1024;
/// Maximum bytes of a response shown as an example.
const EXAMPLE_BYTES: usize = 300;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadTargetApi {
    /// Chat completions API, at `/v1/chat/completions`.
    Chat,
    /// Completions API, at `/v1/completions`.
    Completions,
}

/// Endpoint and parameters of the load.
#[derive(Debug, Clone)]
pub struct LoadTarget {
    /// HTTP client with its connection pool.
    pub client: reqwest::Client,
    /// `http://host:port`, without a path.
    pub base_url: String,
    pub api: LoadTargetApi,
    pub model: String,
    /// Maximum time without a byte.
    pub idle_timeout: Duration,
}

#[derive(Deserialize)]
struct CompletionEvent<'a> {
    #[serde(default)]
    choices: Vec<EventChoice>,
    usage: Option<EventUsage>,
    #[serde(borrow)]
    error: Option<&'a serde_json::value::RawValue>,
}

#[derive(Deserialize)]
struct EventChoice {
    delta: Option<ChoiceDelta>,
    text: Option<String>,
}

#[derive(Deserialize)]
struct ChoiceDelta {
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<serde::de::IgnoredAny>,
}

impl EventChoice {
    fn has_content(&self) -> bool {
        let filled = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        filled(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                filled(&delta.content) || filled(&delta.reasoning_content) || delta.tool_calls.is_some()
            })
    }
}

#[derive(Deserialize)]
struct EventUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<u64>,
}

fn failure(kind: impl Into<String>, detail: impl Into<String>) -> RequestFailure {
    let mut detail = detail.into();
    let mut length = detail.len().min(EXAMPLE_BYTES);
    while !detail.is_char_boundary(length) {
        length -= 1;
    }
    detail.truncate(length);
    RequestFailure { kind: kind.into(), detail }
}

impl LoadTarget {
    /// Sends one request and reads its stream.
    ///
    /// # Errors
    /// The response was incomplete: connection refused, an error status or event, or a stream without its end.
    pub async fn send(&self, prompt: &str, output_tokens: u32) -> Result<RequestMeasurement, RequestFailure> {
        let (path, prompt_member) = match self.api {
            LoadTargetApi::Chat => ("chat/completions", json!([{"role": "user", "content": prompt}])),
            LoadTargetApi::Completions => ("completions", json!(prompt)),
        };
        let name = if self.api == LoadTargetApi::Chat { "messages" } else { "prompt" };
        let body = json!({
            "model": self.model, name: prompt_member, "max_tokens": output_tokens, "stream": true,
            "stream_options": {"include_usage": true}, "temperature": 0, "ignore_eos": true,
        });
        self.post(path, body.to_string().into_bytes(), HeaderMap::new()).await
    }

    /// Sends a body that requests a stream to a path below `/v1/`, with additional headers, and reads the stream.
    ///
    /// # Errors
    /// As for [`LoadTarget::send`].
    pub async fn post(
        &self,
        path: &str,
        body: Vec<u8>,
        headers: HeaderMap,
    ) -> Result<RequestMeasurement, RequestFailure> {
        let started = Instant::now();
        let request = self
            .client
            .post(format!("{}/v1/{path}", self.base_url))
            .headers(headers)
            .header(CONTENT_TYPE, "application/json");
        let sending = request.body(body).send();
        let response = tokio::time::timeout(self.idle_timeout, sending)
            .await
            .map_err(|_| failure("response_timeout", format!("no response within {:?}", self.idle_timeout)))?
            .map_err(|error| network_failure(&error))?;
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            return Err(failure(format!("status_{}", status.as_u16()), text));
        }
        let mut reader = MeasuringReader {
            started,
            last: None,
            outcome: RequestMeasurement::default(),
            events: 0,
            done: false,
        };
        let mut chunks = response.bytes_stream();
        let mut buffer = Vec::new();
        while let Some(chunk) =
            tokio::time::timeout(self.idle_timeout, chunks.next()).await.map_err(|_| {
                failure(
                    "idle_timeout",
                    format!("nothing for {:?} after {} events", self.idle_timeout, reader.events),
                )
            })?
        {
            let chunk = chunk.map_err(|error| {
                failure(
                    "stream_interrupted",
                    format!("after {} events: {}", reader.events, error_chain(&error)),
                )
            })?;
            buffer.extend_from_slice(&chunk);
            reader.read_events(&mut buffer)?;
            if buffer.len() > MAX_EVENT_BYTES {
                return Err(failure("not_event_stream", "an event of more than 16 MiB"));
            }
        }
        reader.finish()
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

fn network_failure(error: &reqwest::Error) -> RequestFailure {
    let kind = if error.is_connect() { "connect" } else { "no_response" };
    failure(kind, error_chain(error))
}

struct MeasuringReader {
    started: Instant,
    last: Option<Instant>,
    outcome: RequestMeasurement,
    events: u64,
    done: bool,
}

impl MeasuringReader {
    fn read_events(&mut self, buffer: &mut Vec<u8>) -> Result<(), RequestFailure> {
        let mut used = 0;
        while let Some(end) = buffer[used..].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[used..used + end];
            self.read_line(line.strip_suffix(b"\r").unwrap_or(line))?;
            used += end + 1;
        }
        buffer.drain(..used);
        Ok(())
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), RequestFailure> {
        let Some(data) = line.strip_prefix(b"data:") else {
            // Comments and other fields are allowed; anything else is not an event stream.
            let other_field = line.is_empty() || line.starts_with(b":") || line.contains(&b':');
            let text = || String::from_utf8_lossy(line).into_owned();
            return if other_field { Ok(()) } else { Err(failure("not_event_stream", text())) };
        };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: CompletionEvent<'_> = serde_json::from_slice(data).map_err(|error| {
            failure("malformed_event", format!("{error}: {}", String::from_utf8_lossy(data)))
        })?;
        if let Some(error) = event.error.filter(|error| error.get() != "null") {
            return Err(failure("error_event", error.get()));
        }
        if event.choices.iter().any(EventChoice::has_content) {
            let now = Instant::now();
            match self.last {
                None => self.outcome.ttft = Some(now - self.started),
                Some(last) => self.outcome.inter_token_latencies.push(now - last),
            }
            self.last = Some(now);
            self.events += 1;
        }
        if let Some(usage) = event.usage {
            self.outcome.prompt_tokens = usage.prompt_tokens;
            self.outcome.completion_tokens = usage.completion_tokens;
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.outcome.cached_tokens = cached.unwrap_or_default();
        }
        Ok(())
    }

    fn finish(mut self) -> Result<RequestMeasurement, RequestFailure> {
        if !self.done {
            return Err(failure("missing_done", format!("the stream ended after {} events", self.events)));
        }
        self.outcome.e2e = self.started.elapsed();
        if self.outcome.completion_tokens == 0 {
            self.outcome.completion_tokens = self.events;
        }
        Ok(self.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(stream: &str) -> Result<RequestMeasurement, RequestFailure> {
        let mut reader = MeasuringReader {
            started: Instant::now(),
            last: None,
            outcome: RequestMeasurement::default(),
            events: 0,
            done: false,
        };
        let mut buffer = stream.as_bytes().to_vec();
        reader.read_events(&mut buffer)?;
        reader.finish()
    }

    #[test]
    fn content_usage_and_end_are_parsed() {
        let outcome = read(concat!(
            ": keep-alive\n\n",
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"usage\":null}\r\n\r\n",
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
            "data: [DONE]\n\n",
        ))
        .expect("a whole stream");
        assert!(outcome.ttft.is_some());
        assert_eq!(
            (outcome.inter_token_latencies.len(), outcome.prompt_tokens, outcome.cached_tokens),
            (1, 9, 4)
        );
    }

    #[test]
    fn an_incomplete_or_failed_stream_is_an_error() {
        let kind = |stream| read(stream).expect_err("an error").kind;
        assert_eq!(kind("data: {\"choices\":[]}\n\n"), "missing_done");
        assert_eq!(kind("data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n"), "error_event");
        assert_eq!(kind("data: {oops\n\n"), "malformed_event");
        assert_eq!(kind("<html>\n"), "not_event_stream");
    }
}
