//! A call that a master accepts is split into calls that masters accept, and any responses of masters become exactly one response.
//!
//! The first byte selects the RPC, the second the dialect, the third the number of shards, and the fourth which shards respond. The rest is
//! the value of the arguments behind their hash, and that of each reply.

#![no_main]

use bytes::{Bytes, BytesMut};
use libfuzzer_sys::fuzz_target;
use mooncake_wire::Dialect;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, ResponseHeader};
use mooncake_wire::rpc::{Request, RpcMethod};
use moongate_store_shards::{ShardCount, ShardResponse, SplitRequest};

fuzz_target!(|bytes: &[u8]| {
    let [method, dialect, shards, responding, value @ ..] = bytes else { return };
    let method = RpcMethod::ALL[usize::from(*method) % RpcMethod::ALL.len()];
    let dialect = Dialect::ALL[usize::from(*dialect) % Dialect::ALL.len()];
    let shards = ShardCount::new(usize::from(*shards % 8) + 1).expect("within the limit");
    let with_hash = |hash: u32| [&hash.to_le_bytes()[..], value].concat();
    let body = with_hash(method.arguments_signature(dialect).hash());
    let Ok(request) = Request::<&str>::decode(method, dialect, &body) else { return };
    let (split, frames) =
        SplitRequest::new(request, dialect, b"x", shards).expect("what was read can be written");
    let reply = with_hash(method.reply_signature(dialect).hash());
    let mut responses = Vec::new();
    for (shard, part) in &frames {
        assert!(*shard < shards.get());
        let Ok(FrameParseResult::Frame(part)) = frame::parse::<RequestHeader>(part, usize::MAX) else {
            panic!("not a frame")
        };
        assert_eq!((part.header.function_id, part.attachment), (method.function_id(), &b"x"[..]));
        Request::<&str>::decode(method, dialect, part.body).expect("a part is a request");
        responses.push(match responding >> (shard % 8) & 1 {
            0 => ShardResponse::Unreachable,
            _ => ShardResponse::Reply(Bytes::from(reply.clone())),
        });
    }
    assert!(frames.is_sorted_by(|one, other| one.0 < other.0), "a shard is called twice");
    let mut out = BytesMut::new();
    split.merge(7, dialect, &responses, &mut out);
    let Ok(FrameParseResult::Frame(response)) = frame::parse::<ResponseHeader>(&out, usize::MAX) else {
        panic!("no response")
    };
    assert_eq!((response.header.sequence, response.size()), (7, out.len()));
});
