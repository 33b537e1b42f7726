//! One client connection: a request, its response, and the arrival times.

use anyhow::{Context as _, bail, ensure};
use memchr::memmem;
use moongate_loadtest::engine::{canned_event_ns, monotonic_ns};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::wire::{ChunkedDecoder, HttpFraming, MAX_BODY, MAX_HEAD, parse_head, status};

#[derive(Debug, Default)]
pub(super) struct ResponseTimings {
    /// When the first byte of the body arrived.
    pub(super) first_byte_ns: u64,
    /// Number of events of a stream.
    pub(super) events: u64,
    /// Time from the engine's write to our read of each token.
    pub(super) delays_ns: Vec<u64>,
}

/// A connection, opened at the first request and again after an error.
#[derive(Debug)]
pub(super) struct BenchConnection {
    port: u16,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
    body: Vec<u8>,
}

impl BenchConnection {
    pub(super) fn new(port: u16) -> Self {
        Self { port, stream: None, buffer: Vec::with_capacity(16 << 10), body: Vec::with_capacity(16 << 10) }
    }

    /// Sends `request` and reads the whole response. `is_stream`: the body consists of events.
    pub(super) async fn exchange(
        &mut self,
        request: &[u8],
        is_stream: bool,
        timings: &mut ResponseTimings,
    ) -> anyhow::Result<()> {
        self.buffer.clear();
        self.body.clear();
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(("127.0.0.1", self.port)).await.context("no connection")?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        stream.write_all(request).await.context("sending")?;
        let head = self.read_head(&mut stream).await?;
        let status = status(&self.buffer).context("the response is not HTTP")?;
        self.buffer.drain(..head.len);
        self.read_body(&mut stream, &head, is_stream && status == 200, timings).await?;
        if status != 200 {
            let start = &self.body[..self.body.len().min(200)];
            bail!("status {status}: {}", String::from_utf8_lossy(start));
        }
        ensure!(is_stream || memmem::find(&self.body, b"\"usage\"").is_some(), "the response has no usage");
        // The connection stays closed after an error or a `Connection: close`.
        self.stream = (!head.close).then_some(stream);
        Ok(())
    }

    async fn read_head(&mut self, stream: &mut TcpStream) -> anyhow::Result<HttpFraming> {
        loop {
            if let Some(head) = parse_head(&self.buffer) {
                return Ok(head);
            }
            ensure!(self.buffer.len() < MAX_HEAD, "the response head exceeds the limit");
            self.read_more(stream).await?;
        }
    }

    async fn read_body(
        &mut self,
        stream: &mut TcpStream,
        head: &HttpFraming,
        is_stream: bool,
        timings: &mut ResponseTimings,
    ) -> anyhow::Result<()> {
        let mut chunked = ChunkedDecoder::default();
        ensure!(head.chunked || head.content_length.is_some(), "the response has no framing");
        let mut last = Vec::new();
        loop {
            let had = self.body.len();
            let done = if head.chunked {
                let (used, done) = chunked.feed(&self.buffer, &mut self.body)?;
                self.buffer.drain(..used);
                done
            } else {
                self.body.append(&mut self.buffer);
                self.body.len() >= head.content_length.unwrap_or(0)
            };
            if had == 0 && !self.body.is_empty() && timings.first_byte_ns == 0 {
                timings.first_byte_ns = monotonic_ns();
            }
            if is_stream {
                drain_events(&mut self.body, timings, &mut last);
            }
            if done {
                ensure!(!is_stream || last == b"data: [DONE]", "the stream ended without [DONE]");
                return Ok(());
            }
            ensure!(self.body.len() < MAX_BODY, "the response body exceeds the limit");
            self.read_more(stream).await?;
        }
    }

    async fn read_more(&mut self, stream: &mut TcpStream) -> anyhow::Result<()> {
        ensure!(
            stream.read_buf(&mut self.buffer).await.context("reading")? > 0,
            "closed before the response was complete"
        );
        Ok(())
    }
}

/// Counts the complete events at the start of `body` and removes them; the last event's text is stored in `last`.
fn drain_events(body: &mut Vec<u8>, timings: &mut ResponseTimings, last: &mut Vec<u8>) {
    let now = monotonic_ns();
    let mut used = 0;
    while let Some(end) = memmem::find(&body[used..], b"\n\n") {
        let event = &body[used..used + end];
        if event.starts_with(b"data:") {
            timings.events += 1;
            timings.delays_ns.extend(canned_event_ns(event).map(|sent| now.saturating_sub(sent)));
            last.clear();
            last.extend_from_slice(&event[..event.len().min(32)]);
        }
        used += end + 2;
    }
    body.drain(..used);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_events_are_drained() {
        let mut body =
            b"data: {\"content\":\"T00000000000000000001\"}\n\n: comment\n\ndata: [DONE]\n\ndata: x".to_vec();
        let (mut timings, mut last) = (ResponseTimings::default(), Vec::new());
        drain_events(&mut body, &mut timings, &mut last);
        assert_eq!((timings.events, timings.delays_ns.len()), (2, 1));
        assert_eq!((last.as_slice(), body.as_slice()), (b"data: [DONE]".as_slice(), b"data: x".as_slice()));
    }
}
