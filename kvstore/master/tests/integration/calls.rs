//! Arbitrary bytes in arbitrary chunks neither break the server nor change its replies.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::frame::{
    self, FrameHeader as _, FrameParseResult, RequestHeader, ResponseHeader, write_request,
};
use mooncake_wire::rpc::RpcMethod;
use moongate_master::call::{CallerSession, RemainingInput};
use moongate_master::journal::MemoryJournal;
use moongate_master::{MasterServer, MasterServerOptions};
use moongate_master_core::MasterCoreOptions;
use moongate_store_testkit::test_master::minimal_request;
use proptest::prelude::*;

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn caller() -> CallerSession {
    let core = MasterCoreOptions { shards: 4, ..MasterCoreOptions::default() };
    let options = MasterServerOptions { core, ..MasterServerOptions::default() };
    CallerSession::new(Arc::new(MasterServer::new(options, Arc::new(MemoryJournal::new(1 << 16)))), HOST, 0)
}

/// Requests of any method in any dialect: well-formed, with changed bytes, or with a random body.
fn request() -> impl Strategy<Value = BytesMut> {
    let method = prop::sample::select(RpcMethod::ALL);
    let change = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3);
    let body = prop::option::weighted(0.2, prop::collection::vec(any::<u8>(), 0..64));
    (method, prop::sample::select(&Dialect::ALL[..]), change, body).prop_map(
        |(method, dialect, change, body)| {
            let dialect = dialect.max(method.since());
            let mut bytes = minimal_request(method, dialect);
            if let Some(body) = body {
                bytes.clear();
                let header = RequestHeader { sequence: 5, function_id: method.function_id() };
                let add = |out: &mut BytesMut| {
                    out.extend_from_slice(&body);
                    Ok(())
                };
                write_request(&mut bytes, header, add).unwrap();
            }
            let size = bytes.len();
            for (position, byte) in change {
                // Frame lengths stay unchanged: otherwise no further request would follow.
                let position = position.index(size);
                if position >= RequestHeader::SIZE {
                    bytes[position] = byte;
                }
            }
            bytes
        },
    )
}

/// Numbers of responses without and with a fault.
fn responses(mut bytes: BytesMut) -> (usize, usize) {
    let mut counts = (0, 0);
    loop {
        match frame::take::<ResponseHeader>(&mut bytes, usize::MAX).unwrap() {
            FrameParseResult::Frame(response) if response.header.error == 0 => counts.0 += 1,
            FrameParseResult::Frame(_) => counts.1 += 1,
            FrameParseResult::Incomplete(_) => {
                assert!(bytes.is_empty());
                return counts;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_request_has_one_response_for_any_chunking(
        requests in prop::collection::vec(request(), 1..20),
        chunk_size in 1..200_usize,
    ) {
        let stream: Vec<u8> = requests.iter().flat_map(|request| request.iter().copied()).collect();
        let (mut unsplit_caller, mut chunked_caller) = (caller(), caller());
        let (mut output, mut chunked_output) = (BytesMut::new(), BytesMut::new());
        let progress = unsplit_caller.run(&stream, &mut output);
        prop_assert_eq!(progress.consumed, stream.len());
        let mut pending = BytesMut::new();
        for chunk_size in stream.chunks(chunk_size) {
            pending.extend_from_slice(chunk_size);
            let progress = chunked_caller.run(&pending, &mut chunked_output);
            let _ = pending.split_to(progress.consumed);
            prop_assert!(matches!(progress.remaining, RemainingInput::Incomplete(1..)));
        }
        prop_assert!(pending.is_empty());
        let expected = responses(output);
        prop_assert_eq!(expected.0 + expected.1, requests.len());
        prop_assert_eq!(responses(chunked_output), expected);
        prop_assert!(unsplit_caller.recorder().commit().is_ok());
    }

    #[test]
    fn no_bytes_break_the_server(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let (mut caller, mut output) = (caller(), BytesMut::new());
        let progress = caller.run(&bytes, &mut output);
        prop_assert!(progress.consumed <= bytes.len());
        responses(output);
    }
}
