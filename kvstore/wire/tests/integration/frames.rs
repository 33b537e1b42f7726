//! Parsing of frames that arrive in pieces, and of invalid bytes.

use bytes::BytesMut;
use mooncake_wire::frame::{
    self, FrameError, FrameHeader, FrameParseResult, RequestHeader, ResponseHeader, RpcFault, write_request,
    write_response,
};
use proptest::prelude::*;

const LIMIT: usize = 4096;

fn body(bytes: &[u8]) -> impl FnOnce(&mut BytesMut) -> Result<(), mooncake_wire::pack::PackError> {
    |out| {
        out.extend_from_slice(bytes);
        Ok(())
    }
}

/// Feeds `stream` in pieces of `piece` bytes and returns the parsed frames.
fn frames<H: FrameHeader>(stream: &[u8], piece: usize) -> Result<Vec<(H, Vec<u8>)>, FrameError> {
    let (mut buffer, mut found) = (BytesMut::new(), Vec::new());
    for piece in stream.chunks(piece) {
        buffer.extend_from_slice(piece);
        loop {
            match frame::take::<H>(&mut buffer, LIMIT)? {
                FrameParseResult::Frame(frame) => found.push((frame.header, frame.body.to_vec())),
                FrameParseResult::Incomplete(missing) => {
                    assert!(missing > 0);
                    break;
                }
            }
        }
    }
    assert!(buffer.is_empty(), "{} bytes left", buffer.len());
    Ok(found)
}

proptest! {
    #[test]
    fn requests_parse_in_pieces_of_any_size(
        sent in prop::collection::vec((any::<u32>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..60)), 0..6),
        piece in 1..100_usize,
    ) {
        let mut stream = BytesMut::new();
        for (sequence, function_id, bytes) in &sent {
            let header = RequestHeader { sequence: *sequence, function_id: *function_id };
            write_request(&mut stream, header, body(bytes)).unwrap();
        }
        let expected: Vec<_> = sent
            .into_iter()
            .map(|(sequence, function_id, bytes)| (RequestHeader { sequence, function_id }, bytes))
            .collect();
        prop_assert_eq!(frames(&stream, piece), Ok(expected));
    }

    #[test]
    fn responses_parse_in_pieces_of_any_size(
        sent in prop::collection::vec((any::<u32>(), any::<u8>(), prop::collection::vec(any::<u8>(), 0..60)), 0..6),
        piece in 1..100_usize,
    ) {
        let mut stream = BytesMut::new();
        for (sequence, error, bytes) in &sent {
            let header = ResponseHeader { sequence: *sequence, error: *error };
            write_response(&mut stream, header, body(bytes)).unwrap();
        }
        let expected: Vec<_> = sent
            .into_iter()
            .map(|(sequence, error, bytes)| (ResponseHeader { sequence, error }, bytes))
            .collect();
        prop_assert_eq!(frames(&stream, piece), Ok(expected));
    }

    #[test]
    fn faults_round_trip(code: u16, message in "\\PC{0,300}", sequence: u32) {
        let fault = RpcFault { code, message };
        let mut out = BytesMut::new();
        fault.write(sequence, &mut out).unwrap();
        let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else { unreachable!() };
        prop_assert_eq!(frame.header.sequence, sequence);
        prop_assert_eq!(RpcFault::parse(frame.header.error, frame.body), Ok(fault));
    }

    #[test]
    fn parsing_arbitrary_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&bytes, LIMIT) {
            prop_assert!(frame.size() <= bytes.len());
        }
        if let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&bytes, LIMIT) {
            prop_assert!(frame.size() <= bytes.len());
        }
    }
}

fn request() -> Vec<u8> {
    let mut out = BytesMut::new();
    write_request(&mut out, RequestHeader { sequence: 1, function_id: 2 }, body(b"body")).unwrap();
    out.to_vec()
}

#[test]
fn an_invalid_header_is_rejected_after_four_bytes() {
    for (offset, wrong, expected) in [
        (0, 0x47, FrameError::Magic(0x47)),
        (1, 1, FrameError::Version(1)),
        (2, 3, FrameError::Serialization(3)),
    ] {
        let mut bytes = request();
        bytes[offset] = wrong;
        assert_eq!(frame::parse::<RequestHeader>(&bytes[..4], LIMIT), Err(expected));
    }
}

#[test]
fn oversized_frame_is_rejected_at_its_header() {
    let mut bytes = request();
    bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    bytes[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let size = 2 * u64::from(u32::MAX);
    let rejected = frame::parse::<RequestHeader>(&bytes[..20], LIMIT);
    assert_eq!(rejected, Err(FrameError::TooLarge { size, limit: LIMIT }));
    assert!(frame::parse::<RequestHeader>(&request(), 4).is_ok());
    assert!(frame::parse::<RequestHeader>(&request(), 3).is_err());
}

#[test]
fn an_attachment_belongs_to_its_frame() {
    let mut bytes = request();
    bytes[16..20].copy_from_slice(&3_u32.to_le_bytes());
    assert_eq!(frame::parse::<RequestHeader>(&bytes, LIMIT), Ok(FrameParseResult::Incomplete(3)));
    let mut attached = BytesMut::from(&request()[..]);
    frame::attach(&mut attached, b"att").unwrap();
    bytes.extend(b"att");
    assert_eq!(attached, bytes);
    bytes.extend(b"next");
    let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&bytes, LIMIT) else {
        unreachable!()
    };
    assert_eq!((frame.body, frame.attachment, frame.size()), (&b"body"[..], &b"att"[..], 27));
}
