//! A master processes any bytes on its RPC port without a panic, and every complete request gets exactly one response.

#![no_main]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, ResponseHeader};
use moongate_master::call::{CallerSession, RemainingInput};
use moongate_master::journal::MemoryJournal;
use moongate_master::{MasterServer, MasterServerOptions};
use moongate_master_core::MasterCoreOptions;

fn requests(mut bytes: BytesMut) -> usize {
    (0..)
        .take_while(|_| {
            matches!(frame::take::<RequestHeader>(&mut bytes, 1 << 28), Ok(FrameParseResult::Frame(_)))
        })
        .count()
}

fn responses(mut bytes: BytesMut) -> usize {
    let whole = |bytes: &mut BytesMut| {
        matches!(frame::take::<ResponseHeader>(bytes, usize::MAX), Ok(FrameParseResult::Frame(_)))
    };
    let count = (0..).take_while(|_| whole(&mut bytes)).count();
    assert!(bytes.is_empty(), "something else than responses");
    count
}

fuzz_target!(|bytes: &[u8]| {
    let core = MasterCoreOptions { shards: 2, ..MasterCoreOptions::default() };
    let options = MasterServerOptions { core, ..MasterServerOptions::default() };
    let server = Arc::new(MasterServer::new(options, Arc::new(MemoryJournal::new(1 << 16))));
    let mut caller = CallerSession::new(Arc::clone(&server), IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let mut output = BytesMut::new();
    let progress = caller.run(bytes, &mut output);
    assert_eq!(responses(output), requests(BytesMut::from(&bytes[..progress.consumed])));
    match progress.remaining {
        RemainingInput::Incomplete(missing) => assert!(missing > 0),
        RemainingInput::More | RemainingInput::Malformed(_) => assert!(progress.consumed <= bytes.len()),
    }
    caller.recorder().commit().expect("memory can always be written");
    server.tick(&mut server.recorder());
});
