//! A store's master parses frames of unauthenticated clients. A frame must be parsed identically whole and in chunks, and never
//! extend beyond the received bytes.

#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use mooncake_wire::frame::{self, FrameHeader, FrameParseResult, RequestHeader, ResponseHeader, RpcFault};

const LIMIT: usize = 1 << 16;

fn check<H: FrameHeader + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let mut buffer = BytesMut::from(bytes);
    match (frame::parse::<H>(bytes, LIMIT), frame::take::<H>(&mut buffer, LIMIT)) {
        (Ok(FrameParseResult::Frame(whole)), Ok(FrameParseResult::Frame(taken))) => {
            assert_eq!(
                (whole.header, whole.body, whole.attachment),
                (taken.header, &taken.body[..], &taken.attachment[..])
            );
            assert_eq!(whole.size() + buffer.len(), bytes.len());
            let less = &bytes[..whole.size() - 1];
            assert!(matches!(frame::parse::<H>(less, LIMIT), Ok(FrameParseResult::Incomplete(1..))));
        }
        (Ok(FrameParseResult::Incomplete(missing)), Ok(FrameParseResult::Incomplete(same))) => {
            assert_eq!((missing, missing > 0), (same, true))
        }
        (Err(error), Err(same)) => assert_eq!(error, same),
        (parsed, taken) => panic!("{parsed:?} {taken:?}"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    check::<RequestHeader>(bytes);
    check::<ResponseHeader>(bytes);
    if let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(bytes, LIMIT) {
        let _ = RpcFault::parse(frame.header.error, frame.body);
    }
});
