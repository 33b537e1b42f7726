//! A master runs whatever comes over its RPC port. No bytes may break it, and every request that arrives as a whole has one
//! response.

#![no_main]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use mooncake_wire::frame::{self, Parsed, RequestHeader, ResponseHeader};
use moongate_kvcore::Settings;
use moongate_master::call::{Caller, Rest};
use moongate_master::journal::MemoryJournal;
use moongate_master::{Server, ServerOptions};

fn requests(mut bytes: BytesMut) -> usize {
    (0..)
        .take_while(|_| matches!(frame::take::<RequestHeader>(&mut bytes, 1 << 28), Ok(Parsed::Frame(_))))
        .count()
}

fn responses(mut bytes: BytesMut) -> usize {
    let whole = |bytes: &mut BytesMut| {
        matches!(frame::take::<ResponseHeader>(bytes, usize::MAX), Ok(Parsed::Frame(_)))
    };
    let count = (0..).take_while(|_| whole(&mut bytes)).count();
    assert!(bytes.is_empty(), "something else than responses");
    count
}

fuzz_target!(|bytes: &[u8]| {
    let core = Settings { shards: 2, ..Settings::default() };
    let options = ServerOptions { core, ..ServerOptions::default() };
    let server = Arc::new(Server::new(options, Arc::new(MemoryJournal::new(1 << 16))));
    let mut caller = Caller::new(Arc::clone(&server), IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let mut output = BytesMut::new();
    let progress = caller.run(bytes, &mut output);
    assert_eq!(responses(output), requests(BytesMut::from(&bytes[..progress.used])));
    match progress.rest {
        Rest::Incomplete(missing) => assert!(missing > 0),
        Rest::More | Rest::Broken(_) => assert!(progress.used <= bytes.len()),
    }
    caller.commit().expect("memory can always be written");
    server.tick(&mut server.recorder());
});
