//! The gateway parses HTTP responses of engines as they arrive. For any pieces in which a response arrives, its status, headers, body and
//! end are the same, and its body consists of received bytes.

#![no_main]

use http::Response;
use libfuzzer_sys::fuzz_target;
use moongate_gateway::{NotHttp, ResponseParser};

#[derive(Debug, PartialEq)]
struct Received {
    status: u16,
    headers: String,
    body: Vec<u8>,
    is_complete: bool,
    leaves_connection_usable: bool,
}

/// What is received until the connection ends; `None` if that is before the end of the head.
fn receive(response: &[u8], piece: usize, is_head: bool) -> Result<Option<Received>, NotHttp> {
    let mut parser = ResponseParser::new(is_head);
    let mut head: Option<Response<()>> = None;
    let mut body = Vec::new();
    for piece in response.chunks(piece) {
        if head.is_some() {
            body.extend_from_slice(&parser.push_body(piece)?);
            continue;
        }
        head = parser.push_head(piece)?;
        if head.is_some() {
            body.extend_from_slice(&parser.take_buffered()?);
        }
    }
    let leaves_connection_usable = parser.leaves_connection_usable();
    let is_complete = parser.end();
    Ok(head.map(|head| {
        let (status, headers) = (head.status().as_u16(), format!("{:?}", head.headers()));
        Received { status, headers, body, is_complete, leaves_connection_usable }
    }))
}

// The first byte is the length of a piece, and whether the request was HEAD.
fuzz_target!(|input: &[u8]| {
    let Some((first, response)) = input.split_first() else { return };
    let (piece, is_head) = (usize::from(first / 2).max(1), first & 1 == 1);
    let whole = receive(response, response.len().max(1), is_head);
    let pieces = receive(response, piece, is_head);
    match (&whole, &pieces) {
        (Ok(whole), Ok(pieces)) => assert_eq!(whole, pieces),
        _ => assert_eq!(whole.is_err(), pieces.is_err(), "{whole:?} {pieces:?}"),
    }
    if let Ok(Some(received)) = whole {
        assert!(received.body.len() <= response.len());
        assert!(received.is_complete || !received.leaves_connection_usable);
    }
});
