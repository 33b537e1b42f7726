//! A streamed response: every event is an HTTP chunk and a separate write, as with real engines.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::responses::MODEL;
use crate::clock::now_ns;

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const DONE: &[u8] = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
const PREFIX: &str = "data: {\"id\":\"0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\
    \"created\":1700000000,\"model\":\"";

/// Text before the twenty digits of a token's timestamp.
pub(crate) const TIMESTAMP_PREFIX: &[u8] = b"\"content\":\"T";
/// Digits of a token's timestamp: nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) const TIMESTAMP_DIGITS: usize = 20;

/// A response to be streamed.
pub(super) struct MockTokenStream {
    tokens: u32,
    itl: Duration,
}

impl MockTokenStream {
    pub(super) fn new(tokens: u32, itl: Duration) -> Self {
        Self { tokens, itl }
    }

    pub(super) async fn send(&self, stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(HEAD).await?;
        let mut event = TokenEvent::new();
        let started = Instant::now();
        for token in 0..self.tokens {
            if self.itl.is_zero() {
                // An engine's step generates one token for each of its streams; without this, one stream would get
                // ahead, and its events would arrive at the gateway in one piece.
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep_until(started + self.itl * token).await;
            }
            stream.write_all(event.with_timestamp()).await?;
        }
        stream.write_all(&usage_event(self.tokens)).await?;
        stream.write_all(DONE).await
    }
}

/// The event of one token, complete except for its timestamp.
struct TokenEvent {
    chunk: Vec<u8>,
    /// Offset of the timestamp's digits.
    timestamp_offset: usize,
}

impl TokenEvent {
    fn new() -> Self {
        let before =
            format!("{PREFIX}{MODEL}\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":null,\"content\":\"T");
        let after = "\",\"reasoning_content\":null,\"tool_calls\":null},\"logprobs\":null,\"finish_reason\":null,\
            \"matched_stop\":null}],\"usage\":null}\n\n";
        let chunk = chunk(&format!("{before}{:020}{after}", 0));
        let size_line = chunk.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        Self { chunk, timestamp_offset: size_line + before.len() }
    }

    fn with_timestamp(&mut self) -> &[u8] {
        let mut now = now_ns();
        for digit in
            self.chunk[self.timestamp_offset..self.timestamp_offset + TIMESTAMP_DIGITS].iter_mut().rev()
        {
            *digit = b'0' + u8::try_from(now % 10).unwrap_or(0);
            now /= 10;
        }
        &self.chunk
    }
}

fn usage_event(tokens: u32) -> Vec<u8> {
    let total = u64::from(tokens) + 64;
    chunk(&format!(
        "{PREFIX}{MODEL}\",\"choices\":[],\"usage\":{{\"prompt_tokens\":64,\"total_tokens\":{total},\
         \"completion_tokens\":{tokens},\"prompt_tokens_details\":null}}}}\n\n"
    ))
}

fn chunk(data: &str) -> Vec<u8> {
    format!("{:x}\r\n{data}\r\n", data.len()).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ChunkedDecoder;

    #[test]
    fn events_are_chunks_of_json() {
        let mut event = TokenEvent::new();
        let sent = [event.with_timestamp(), &usage_event(3), DONE].concat();
        let mut body = Vec::new();
        assert_eq!(ChunkedDecoder::default().feed(&sent, &mut body).unwrap(), (sent.len(), true));
        let body = String::from_utf8(body).unwrap();
        let events: Vec<_> =
            body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
        let token: serde_json::Value = serde_json::from_str(events[0]).unwrap();
        let time = token["choices"][0]["delta"]["content"].as_str().unwrap().strip_prefix('T').unwrap();
        assert_eq!(time.len(), TIMESTAMP_DIGITS);
        assert!(now_ns() - time.parse::<u64>().unwrap() < 60_000_000_000);
        let usage: serde_json::Value = serde_json::from_str(events[1]).unwrap();
        assert_eq!(usage["usage"]["total_tokens"], 67);
        assert_eq!(events[2..], ["[DONE]"]);
    }
}
