//! A ZMTP peer's bytes are parsed identically for any chunking, and no length declared by the peer may use more memory than the bytes
//! that it has sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_zmtp::codec::{DecodedItem, ZmtpDecoder, ZmtpGreeting, ZmtpLimits, ZmtpProtocolError};

const LIMITS: ZmtpLimits = ZmtpLimits { message_bytes: 4096, parts: 8, command_bytes: 512 };

fn decode(stream: &[u8], piece: usize) -> (Vec<DecodedItem>, Option<ZmtpProtocolError>) {
    let mut decoder = ZmtpDecoder::new(LIMITS);
    let mut items = Vec::new();
    for piece in stream.chunks(piece) {
        decoder.buffer().extend_from_slice(piece);
        loop {
            match decoder.decode() {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break,
                Err(error) => return (items, Some(error)),
            }
        }
        assert!(decoder.buffer().capacity() <= 2 * stream.len().max(64));
    }
    (items, None)
}

// The first byte is the length of a chunk, and whether a valid greeting comes first.
fuzz_target!(|input: &[u8]| {
    let Some((&first, bytes)) = input.split_first() else { return };
    let greeting = if first & 1 == 1 { &ZmtpGreeting::encode()[..] } else { &[] };
    let stream = [greeting, bytes].concat();
    let whole = decode(&stream, stream.len().max(1));
    assert_eq!(decode(&stream, usize::from(first / 2).max(1)), whole);
});
