//! Request bodies: prompts whose beginnings are shared with others, like chats with a common history.

use anyhow::ensure;

use crate::text::append_word;

/// Number of groups of prompts with a common prefix.
const PREFIX_GROUPS: usize = 64;
/// Size of the text from which unique ends are cut.
const POOL_BYTES: usize = 1 << 20;
const BODY_PREFIX: &str = "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"";
/// Digits that make a prompt unique even if its end is cut from the same position.
const SERIAL_DIGITS: usize = 8;

pub(super) fn tail(max_tokens: u32, stream: bool, itl_ms: Option<u32>) -> String {
    let mut tail = format!("\"}}],\"max_tokens\":{max_tokens}");
    if stream {
        tail.push_str(",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    }
    if let Some(ms) = itl_ms {
        tail.push_str(&format!(",\"user\":\"itl-ms-{ms}\""));
    }
    tail.push('}');
    tail
}

/// Creates requests of one size.
#[derive(Debug)]
pub(super) struct PromptGenerator {
    /// Request heads with the shared prefixes.
    shared_prefixes: Vec<Vec<u8>>,
    pool: Vec<u8>,
    unique_bytes: usize,
    tail: Vec<u8>,
}

impl PromptGenerator {
    /// Bodies of this size, of whose prompts `unique_percent` are in no other.
    pub(super) fn new(body_bytes: usize, unique_percent: usize, tail: &str) -> anyhow::Result<Self> {
        let least = BODY_PREFIX.len() + tail.len() + 2 * SERIAL_DIGITS;
        ensure!(
            (least..=POOL_BYTES).contains(&body_bytes),
            "--body-bytes {body_bytes}: bodies of this kind have {least} to {POOL_BYTES} bytes"
        );
        let prompt = body_bytes - BODY_PREFIX.len() - tail.len();
        let unique = (prompt * unique_percent / 100).clamp(SERIAL_DIGITS, prompt);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
             accept: */*\r\nuser-agent: gateway-bench\r\ncontent-length: {body_bytes}\r\n\r\n"
        );
        let beginnings = (0..PREFIX_GROUPS as u64)
            .map(|group| {
                let shared = text(prompt - unique, &mut fastrand::Rng::with_seed(group));
                [head.as_bytes(), BODY_PREFIX.as_bytes(), &shared].concat()
            })
            .collect();
        let pool = text(POOL_BYTES, &mut fastrand::Rng::with_seed(PREFIX_GROUPS as u64));
        Ok(Self { shared_prefixes: beginnings, pool, unique_bytes: unique, tail: tail.as_bytes().to_vec() })
    }

    /// A request body with nothing behind the prefix, for each prefix.
    pub(super) fn prefix_bodies(&self) -> impl Iterator<Item = Vec<u8>> {
        self.shared_prefixes.iter().map(|request| {
            let head = crate::wire::parse_head(request).map_or(0, |head| head.len);
            let mut body = request[head..].to_vec();
            strip_trailing_escape(&mut body);
            [body.as_slice(), &self.tail].concat()
        })
    }

    /// Writes a whole request, including its head, to `request`.
    pub(super) fn write(&self, rng: &mut fastrand::Rng, request: &mut Vec<u8>) {
        request.clear();
        request.extend_from_slice(&self.shared_prefixes[rng.usize(..PREFIX_GROUPS)]);
        let serial = format!("{:0SERIAL_DIGITS$x}", rng.u32(..));
        request.extend_from_slice(serial.as_bytes());
        let rest = self.unique_bytes - SERIAL_DIGITS;
        let from = rng.usize(..=POOL_BYTES - rest);
        request.extend_from_slice(&self.pool[from..from + rest]);
        strip_trailing_escape(request);
        request.extend_from_slice(&self.tail);
    }
}

/// Text, escaped for a JSON string.
fn text(bytes: usize, rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut text = String::with_capacity(bytes + 64);
    while text.len() < bytes {
        append_word(&mut text, rng);
    }
    let mut text = text.replace('\n', "\\n").into_bytes();
    text.truncate(bytes);
    strip_trailing_escape(&mut text);
    text
}

/// A cut between a backslash and the escaped character would escape the closing quote.
fn strip_trailing_escape(text: &mut [u8]) {
    if let Some(last @ b'\\') = text.last_mut() {
        *last = b' ';
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_json_of_the_requested_size() {
        let tail = tail(64, true, Some(10));
        for size in [200, 1000, 32 << 10] {
            let prompts = PromptGenerator::new(size, 25, &tail).unwrap();
            let mut rng = fastrand::Rng::with_seed(7);
            let (mut request, mut last) = (Vec::new(), Vec::new());
            for _ in 0..100 {
                prompts.write(&mut rng, &mut request);
                let body = crate::wire::parse_head(&request).unwrap().len;
                assert_eq!(request.len() - body, size);
                let parsed: serde_json::Value = serde_json::from_slice(&request[body..]).unwrap();
                assert_eq!(parsed["user"], "itl-ms-10");
                assert_ne!(request, last);
                last.clone_from(&request);
            }
        }
        assert!(PromptGenerator::new(60, 25, &tail).is_err());
    }
}
