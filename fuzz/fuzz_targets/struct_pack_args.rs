//! Arguments of RPCs come from any client. Arguments that are accepted in a dialect are unchanged after a round trip.
//!
//! The first byte selects the RPC and the second the dialect; the rest is the value behind the header, so that no hash must be guessed.
//! If the second byte is 128 or more, the rest has a metadata byte.

#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use mooncake_wire::Dialect;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader};
use mooncake_wire::rpc::{Request, RpcMethod};

fuzz_target!(|bytes: &[u8]| {
    let [method, dialect, value @ ..] = bytes else { return };
    let method = RpcMethod::ALL[usize::from(*method) % RpcMethod::ALL.len()];
    let metadata = u32::from(*dialect >> 7);
    let dialect = Dialect::ALL[usize::from(*dialect & 127) % Dialect::ALL.len()];
    let mut body = (method.arguments_signature(dialect).hash() | metadata).to_le_bytes().to_vec();
    body.extend(value);
    let Ok(request) = Request::<&str>::decode(method, dialect, &body) else { return };
    assert!(method.request_dialects(&body).contains(dialect));
    let mut out = BytesMut::new();
    request.encode(0, dialect, &mut out).expect("what was read can be written");
    let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, usize::MAX) else {
        panic!("not a frame")
    };
    assert_eq!(Request::decode(method, dialect, frame.body), Ok(request));
});
