//! Writes a request to an engine's connection: its head in one buffer, its body as the slices that it consists of.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::{HeaderName, HeaderValue, Method};
use tokio::io::AsyncWrite;

use super::pool::PreparedRequest;

/// Slices of one system call. Edited bodies have a few.
const MAX_SLICES: usize = 16;

/// A request that has not been sent completely.
#[derive(Debug)]
pub(super) struct RequestWriter {
    /// The rest of the head and the body, in reverse order.
    slices: Vec<Bytes>,
}

impl RequestWriter {
    pub(super) fn new(request: &PreparedRequest, host: Option<&HeaderValue>) -> Self {
        let mut slices = Vec::with_capacity(1 + request.body.chunks().len());
        slices.extend(request.body.chunks().iter().rev().filter(|chunk| !chunk.is_empty()).cloned());
        slices.push(Bytes::from(head(request, host)));
        Self { slices }
    }

    /// Writes as far as possible now. Ready when everything has been sent.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<io::Result<()>> {
        while !self.slices.is_empty() {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let count = self.slices.len().min(MAX_SLICES);
            for (slice, bytes) in slices.iter_mut().zip(self.slices.iter().rev()) {
                *slice = IoSlice::new(bytes);
            }
            // A stream that cannot write several slices at once writes the first.
            let written = ready!(Pin::new(&mut *stream).poll_write_vectored(cx, &slices[..count]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(written);
        }
        Pin::new(stream).poll_flush(cx)
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(first) = self.slices.last_mut() {
            if written < first.len() {
                return first.advance(written);
            }
            written -= first.len();
            self.slices.pop();
        }
    }
}

/// The request line and the headers.
fn head(request: &PreparedRequest, host: Option<&HeaderValue>) -> Vec<u8> {
    let PreparedRequest { method, uri, headers, extra_headers, body } = request;
    let mut head = Vec::with_capacity(512);
    head.extend_from_slice(method.as_str().as_bytes());
    head.push(b' ');
    head.extend_from_slice(uri.path_and_query().map_or("/", |target| target.as_str()).as_bytes());
    head.extend_from_slice(b" HTTP/1.1\r\n");
    if let Some(host) = host {
        add(&mut head, &HOST, host.as_bytes());
    }
    // These follow from the connection and the body.
    let is_own = |name: &HeaderName| *name == HOST || *name == CONTENT_LENGTH || *name == TRANSFER_ENCODING;
    let is_replaced =
        |name: &HeaderName, by: &[(HeaderName, HeaderValue)]| by.iter().any(|(other, _)| other == name);
    for (name, value) in headers.iter() {
        if !is_own(name) && !is_replaced(name, extra_headers) {
            add(&mut head, name, value.as_bytes());
        }
    }
    for (position, (name, value)) in extra_headers.iter().enumerate() {
        if !is_own(name) && !is_replaced(name, &extra_headers[position + 1..]) {
            add(&mut head, name, value.as_bytes());
        }
    }
    let length = body.len();
    if length > 0 || matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
        add(&mut head, &CONTENT_LENGTH, length.to_string().as_bytes());
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn add(head: &mut Vec<u8>, name: &HeaderName, value: &[u8]) {
    head.extend_from_slice(name.as_str().as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value);
    head.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::HeaderMap;
    use http::header::{AUTHORIZATION, CONTENT_TYPE};
    use tokio::io::AsyncReadExt as _;

    use super::*;
    use crate::request_body::SplicedBody;

    fn request(method: Method, body: &'static str) -> PreparedRequest {
        let mut headers = HeaderMap::new();
        for (name, value) in [(CONTENT_TYPE, "a"), (CONTENT_TYPE, "b"), (AUTHORIZATION, "c"), (HOST, "d")] {
            headers.append(name, HeaderValue::from_static(value));
        }
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("99"));
        let extra =
            |name: &'static str, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        PreparedRequest {
            method,
            uri: "/v1/x?a=1".parse().unwrap(),
            headers: Arc::new(headers),
            extra_headers: vec![extra("authorization", "e"), extra("x-id", "f"), extra("x-id", "g")],
            body: SplicedBody::verbatim(Bytes::from_static(body.as_bytes())),
        }
    }

    #[test]
    fn headers_of_the_leg_replace_shared_ones() {
        let host = HeaderValue::from_static("engine:80");
        let head = String::from_utf8(head(&request(Method::POST, "{}"), Some(&host))).unwrap();
        assert_eq!(
            head,
            "POST /v1/x?a=1 HTTP/1.1\r\nhost: engine:80\r\ncontent-type: a\r\ncontent-type: b\r\n\
             authorization: e\r\nx-id: g\r\ncontent-length: 2\r\n\r\n"
        );
    }

    #[test]
    fn only_methods_with_a_body_declare_an_empty_one() {
        let head = |method| String::from_utf8(head(&request(method, ""), None)).unwrap();
        assert!(head(Method::POST).contains("content-length: 0\r\n"));
        assert!(!head(Method::GET).contains("content-length"));
    }

    #[tokio::test]
    async fn all_slices_are_sent_through_a_narrow_pipe() {
        let chunks: Vec<String> = (0..40).map(|number| number.to_string().repeat(number)).collect();
        let expected = chunks.concat();
        let mut request = request(Method::POST, "");
        request.body = SplicedBody::of_chunks(chunks.into_iter().map(Bytes::from).collect());
        let mut writer = RequestWriter::new(&request, None);
        let (mut near, mut far) = tokio::io::duplex(7);
        let send = async {
            std::future::poll_fn(|cx| writer.poll_write(cx, &mut near)).await.unwrap();
            drop(near);
        };
        let mut received = String::new();
        let (_, read) = tokio::join!(send, far.read_to_string(&mut received));
        read.unwrap();
        assert_eq!(received.split_once("\r\n\r\n").unwrap().1, expected);
    }
}
