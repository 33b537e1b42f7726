//! One client connection to a mock engine.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::request::CompletionParams;
use super::responses::MockRole;
use super::stream::MockTokenStream;
use super::{MockEngine, responses};
use crate::wire::{HttpFraming, MAX_BODY, MAX_HEAD, parse_head};

/// Serves requests until the peer closes the connection.
pub(super) async fn serve(mut stream: TcpStream, engine: &MockEngine) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(16 << 10);
    loop {
        let Some(head) = read_head(&mut stream, &mut buffer).await? else { return Ok(()) };
        if let Some(refusal) = responses::length_required(&head) {
            return stream.write_all(&refusal).await;
        }
        let body = head.content_length.unwrap_or(0);
        if body > MAX_BODY {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let total = head.len + body;
        buffer.reserve(total.saturating_sub(buffer.len()));
        while buffer.len() < total {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        answer(&mut stream, engine, &buffer[..head.len], &buffer[head.len..total]).await?;
        if head.close {
            return stream.shutdown().await;
        }
        buffer.drain(..total);
    }
}

/// `None` if the peer closed between two requests.
async fn read_head(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<HttpFraming>> {
    loop {
        if let Some(head) = parse_head(buffer) {
            return Ok(Some(head));
        }
        if buffer.len() > MAX_HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if stream.read_buf(buffer).await? == 0 {
            return if buffer.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
    }
}

async fn answer(stream: &mut TcpStream, engine: &MockEngine, head: &[u8], body: &[u8]) -> io::Result<()> {
    let path = path(head);
    let is_completion = matches!(path, "/v1/chat/completions" | "/v1/completions" | "/generate");
    if !is_completion || !engine.responses.is_engine() {
        return stream.write_all(engine.responses.fixed_response(path)).await;
    }
    let params = CompletionParams::parse(body);
    if engine.responses.requires_bootstrap_room() && !params.has_bootstrap_room {
        return stream.write_all(engine.responses.missing_bootstrap_room()).await;
    }
    if !params.stream {
        return stream.write_all(engine.responses.completion()).await;
    }
    // A prefill engine generates the first token and responds at once.
    let tokens = if matches!(engine.responses.role, MockRole::Prefill { .. }) { 1 } else { params.tokens };
    MockTokenStream::new(tokens, params.itl.unwrap_or(engine.itl)).send(stream).await
}

/// Path of the request line, without its query.
fn path(head: &[u8]) -> &str {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let target = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    std::str::from_utf8(path).unwrap_or_default()
}
