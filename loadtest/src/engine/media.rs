//! Transcription of audio, in the engines' format, and canned speech and images, as servers built on the engines have.

use std::collections::HashMap;

use bytes::Bytes;
use futures_util::stream;
use http::request::Parts;
use http::{StatusCode, header};
use memchr::memmem;
use serde_json::{Value, json};

use super::request::json_object;
use super::response::{self, SimRejection, SimResponse};
use super::stats::unix_ms;
use super::tokens::{TokenGenerator, hash_bytes};
use super::{SimEngineState, SimProtocol, api_vllm};

/// Maximum number of fields of a form.
const MAX_FIELDS: usize = 64;
/// Number of tokens of a transcript.
const TRANSCRIPT_TOKENS: u64 = 8;
/// Bytes of audio that count as a second: 16-bit samples at 16 kHz.
const BYTES_PER_SECOND: usize = 32_000;
/// Maximum number of images of a request.
const MAX_IMAGES: u64 = 16;
/// An image of one pixel.
const PNG_BASE64: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
/// Audio without samples.
const WAV: &[u8] =
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0";

/// The response to a POST, or `None` if the path is another one.
pub(crate) fn dispatch(engine: &SimEngineState, parts: &Parts, body: &Bytes) -> Option<SimResponse> {
    let result = match parts.uri.path() {
        "/v1/audio/transcriptions" => transcription(engine, parts, body),
        "/v1/audio/speech" => model_of(engine, body).map(|_| response::bytes("audio/wav", WAV)),
        "/v1/images/generations" => images(engine, body),
        _ => return None,
    };
    Some(result.unwrap_or_else(|rejection| response::rejection(engine.options.protocol, &rejection)))
}

/// Checks the model; returns the body.
fn model_of(engine: &SimEngineState, body: &Bytes) -> Result<serde_json::Map<String, Value>, SimRejection> {
    let body = json_object(body)?;
    api_vllm::check_model(engine, body.get("model").and_then(Value::as_str))?;
    Ok(body)
}

fn images(engine: &SimEngineState, body: &Bytes) -> Result<SimResponse, SimRejection> {
    let body = model_of(engine, body)?;
    if !body.get("prompt").is_some_and(Value::is_string) {
        return Err(SimRejection::invalid_body("prompt", "Field required"));
    }
    let count = body.get("n").and_then(Value::as_u64).unwrap_or(1).clamp(1, MAX_IMAGES);
    let data: Vec<Value> = (0..count).map(|_| json!({"b64_json": PNG_BASE64})).collect();
    Ok(response::json_ok(&json!({"created": unix_ms() / 1_000, "data": data})))
}

fn transcription(engine: &SimEngineState, parts: &Parts, body: &Bytes) -> Result<SimResponse, SimRejection> {
    let protocol = engine.options.protocol;
    let fields = form_fields(parts, body)?;
    let text_field = |name: &str| fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
    let file = fields.get("file").ok_or_else(|| SimRejection::invalid_body("file", "Field required"))?;
    if protocol == SimProtocol::Vllm {
        api_vllm::check_model(engine, text_field("model"))?;
    }
    let generator = TokenGenerator::new(hash_bytes(file), 0);
    let words: Vec<String> = (0..TRANSCRIPT_TOKENS).map(|index| generator.token_text(index)).collect();
    let model = text_field("model").filter(|model| !model.is_empty()).unwrap_or(&engine.options.model);
    if text_field("stream") == Some("true") {
        return Ok(transcription_stream(model, &words));
    }
    let (text, seconds) = (words.concat().trim_start().to_owned(), file.len().div_ceil(BYTES_PER_SECOND));
    let usage = json!({"type": "duration", "seconds": seconds});
    match (text_field("response_format").unwrap_or("json"), protocol) {
        // vLLM's text is JSON too.
        ("text", SimProtocol::Sglang) => Ok(response::text(StatusCode::OK, text)),
        ("json" | "text", _) => Ok(response::json_ok(&json!({"text": text, "usage": usage}))),
        ("verbose_json", _) => Ok(response::json_ok(&json!({
            "text": text, "language": text_field("language"), "duration": seconds, "segments": [], "usage": usage,
        }))),
        (other, _) => Err(SimRejection::bad_request(format!(
            "Currently only support response_format: `text`, `json` or `verbose_json`, got {other}"
        ))),
    }
}

fn transcription_stream(model: &str, words: &[String]) -> SimResponse {
    let id = format!("transcribe-{}", response::hex_id());
    let created = unix_ms() / 1_000;
    let mut events: Vec<Bytes> = words
        .iter()
        .enumerate()
        .map(|(index, word)| {
            let finish = (index + 1 == words.len()).then_some("stop");
            response::event(
                &json!({"id": id, "object": "transcription.chunk", "created": created, "model": model,
                "choices": [{"delta": {"content": word}, "finish_reason": finish}]}),
            )
        })
        .collect();
    events.push(response::done_event());
    response::stream("text/event-stream; charset=utf-8", stream::iter(events.into_iter().map(Ok)))
}

/// Fields of a `multipart/form-data` body, by name.
fn form_fields<'a>(parts: &Parts, body: &'a [u8]) -> Result<HashMap<String, &'a [u8]>, SimRejection> {
    let invalid = || SimRejection::bad_request("the body must be multipart/form-data");
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let boundary = content_type
        .filter(|content_type| content_type.starts_with("multipart/form-data"))
        .and_then(|content_type| content_type.split_once("boundary="))
        .map(|(_, rest)| rest.split(';').next().unwrap_or_default().trim_matches('"'))
        .filter(|boundary| !boundary.is_empty())
        .ok_or_else(invalid)?;
    let delimiter = format!("--{boundary}");
    let offsets: Vec<usize> = memmem::find_iter(body, &delimiter).take(MAX_FIELDS + 1).collect();
    let mut fields = HashMap::new();
    for pair in offsets.windows(2) {
        let part = &body[pair[0] + delimiter.len()..pair[1]];
        let end = memmem::find(part, b"\r\n\r\n").ok_or_else(invalid)?;
        let head = String::from_utf8_lossy(&part[..end]);
        let name =
            head.split_once("name=\"").and_then(|(_, rest)| rest.split_once('"')).ok_or_else(invalid)?.0;
        let value = &part[end + 4..];
        fields.insert(name.to_owned(), value.strip_suffix(b"\r\n").unwrap_or(value));
    }
    if fields.is_empty() { Err(invalid()) } else { Ok(fields) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(content_type: &str) -> Parts {
        http::Request::builder().header("content-type", content_type).body(()).unwrap().into_parts().0
    }

    #[test]
    fn forms_are_parsed() {
        let body = b"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n\
            --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\0\r\n\x01\r\n--b--\r\n";
        let fields = form_fields(&parts("multipart/form-data; boundary=\"b\""), body).unwrap();
        assert_eq!((fields["model"], fields["file"]), (&b"m"[..], &b"\0\r\n\x01"[..]));
        for (content_type, body) in [
            ("application/json", &body[..]),
            ("multipart/form-data", body),
            ("multipart/form-data; boundary=", body),
            ("multipart/form-data; boundary=c", body),
            ("multipart/form-data; boundary=b", b"--b\r\nno head--b--"),
        ] {
            assert!(form_fields(&parts(content_type), body).is_err(), "{content_type}");
        }
    }
}
