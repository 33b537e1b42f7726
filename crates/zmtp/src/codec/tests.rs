use bytes::{BufMut, Bytes, BytesMut};
use proptest::prelude::*;

use super::*;

const LIMITS: ZmtpLimits = ZmtpLimits { message_bytes: 2000, parts: 6, command_bytes: 300 };

fn bytes(length: std::ops::Range<usize>) -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), length).prop_map(Bytes::from)
}

fn socket_type() -> impl Strategy<Value = ZmtpSocketType> {
    prop::sample::select(vec![
        ZmtpSocketType::Pub,
        ZmtpSocketType::Sub,
        ZmtpSocketType::XPub,
        ZmtpSocketType::Router,
    ])
}

fn item() -> impl Strategy<Value = DecodedItem> {
    prop_oneof![
        prop::collection::vec(bytes(0..330), 1..6)
            .prop_map(|parts| DecodedItem::Message(ZmtpMessage::new(parts))),
        socket_type()
            .prop_map(|socket_type| DecodedItem::Command(ZmtpCommand::Ready(ReadyCommand { socket_type }))),
        "[a-z ]{0,40}".prop_map(|reason| DecodedItem::Command(ZmtpCommand::Error(reason))),
        bytes(0..280).prop_map(|topic| DecodedItem::Command(ZmtpCommand::Subscribe(topic))),
        bytes(0..280).prop_map(|topic| DecodedItem::Command(ZmtpCommand::Cancel(topic))),
        (any::<u16>(), bytes(0..17))
            .prop_map(|(ttl, context)| DecodedItem::Command(ZmtpCommand::Ping { ttl, context })),
        bytes(0..17).prop_map(|context| DecodedItem::Command(ZmtpCommand::Pong(context))),
    ]
}

fn encode(items: &[DecodedItem]) -> BytesMut {
    let mut out = BytesMut::new();
    for item in items {
        match item {
            DecodedItem::Greeting(_) => out.put_slice(&ZmtpGreeting::encode()),
            DecodedItem::Command(command) => command.encode(&mut out),
            DecodedItem::Message(message) => message.encode(&mut out),
        }
    }
    out
}

/// Decodes a stream that arrives in chunks of these lengths, repeated in a cycle.
fn decode(
    stream: &[u8],
    chunks: &[usize],
    limits: ZmtpLimits,
) -> Result<Vec<DecodedItem>, ZmtpProtocolError> {
    let mut decoder = ZmtpDecoder::new(limits);
    let mut items = Vec::new();
    let mut rest = stream;
    for &chunk in chunks.iter().cycle() {
        let (received, remaining) = rest.split_at(chunk.min(rest.len()));
        decoder.buffer().extend_from_slice(received);
        while let Some(item) = decoder.decode()? {
            items.push(item);
        }
        rest = remaining;
        if rest.is_empty() {
            break;
        }
    }
    Ok(items)
}

fn with_greeting(after: &[u8]) -> Vec<u8> {
    [&ZmtpGreeting::encode()[..], after].concat()
}

proptest! {
    #[test]
    fn any_chunking_of_the_stream_decodes_to_the_same_items(
        mut items in prop::collection::vec(item(), 0..8),
        chunks in prop::collection::vec(1_usize..600, 1..8),
    ) {
        items.insert(0, DecodedItem::Greeting(ZmtpGreeting { minor: 1 }));
        let stream = encode(&items);
        prop_assert_eq!(decode(&stream, &chunks, LIMITS), Ok(items));
    }

    #[test]
    fn hostile_bytes_neither_panic_nor_grow_the_memory(
        stream in prop::collection::vec(any::<u8>(), 0..400),
        chunks in prop::collection::vec(1_usize..40, 1..8),
        greeting in any::<bool>(),
    ) {
        let stream = if greeting { with_greeting(&stream) } else { stream };
        let mut decoder = ZmtpDecoder::new(LIMITS);
        let mut rest = &stream[..];
        'stream: for &chunk in chunks.iter().cycle() {
            let (received, remaining) = rest.split_at(chunk.min(rest.len()));
            decoder.buffer().extend_from_slice(received);
            loop {
                match decoder.decode() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => break 'stream,
                }
            }
            prop_assert!(decoder.buffer().capacity() <= 1024, "for {} bytes", stream.len());
            rest = remaining;
            if rest.is_empty() {
                break;
            }
        }
    }
}

#[test]
fn the_greeting_matches_the_specification() {
    let mut expected = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
    expected.extend_from_slice(b"NULL");
    expected.resize(64, 0);
    assert_eq!(ZmtpGreeting::encode()[..], expected);
}

#[test]
fn the_ready_command_matches_the_specification() {
    let mut out = BytesMut::new();
    ZmtpCommand::Ready(ReadyCommand { socket_type: ZmtpSocketType::Sub }).encode(&mut out);
    assert_eq!(out[..], *b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
}

#[test]
fn other_protocols_are_rejected_at_their_first_bytes() {
    let first = |stream: &[u8]| decode(stream, &[64], LIMITS);
    assert_eq!(first(b"GET / HTTP/1.1\r\n"), Err(ZmtpProtocolError::NotZmtp));
    assert_eq!(first(b"\xff\0\0\0\0\0\0\0\x01\x7e"), Err(ZmtpProtocolError::NotZmtp));
    assert_eq!(first(b"\xff\0\0\0\0\0\0\0\x01\x7f\x01"), Err(ZmtpProtocolError::Version(1)));
    let mut curve = ZmtpGreeting::encode();
    curve[12..17].copy_from_slice(b"CURVE");
    assert_eq!(first(&curve), Err(ZmtpProtocolError::Mechanism("CURVE".to_owned())));
    let mut remaining = ZmtpGreeting::encode();
    (remaining[10], remaining[11]) = (4, 0);
    assert_eq!(first(&remaining), Ok(vec![DecodedItem::Greeting(ZmtpGreeting { minor: 1 })]));
}

#[test]
fn limits_are_checked_before_the_body_arrives() {
    let after = |frames: &[u8]| decode(&with_greeting(frames), &[4096], LIMITS).map(|items| items.len());
    let long = |flags: u8, length: u64| [&[flags][..], &length.to_be_bytes()].concat();
    let too_long = |length, left| Err(ZmtpProtocolError::TooLong { length, left });
    assert_eq!(after(&long(LONG, u64::MAX)), too_long(u64::MAX, 2000));
    assert_eq!(after(&long(LONG, 2001)), too_long(2001, 2000));
    assert_eq!(after(&long(LONG, 2000)), Ok(1), "the greeting only; the body is incomplete");
    assert_eq!(after(&long(LONG | COMMAND, 301)), too_long(301, 300));
    // The limit covers all parts together.
    let second = [&[MORE, 3, 1, 2, 3][..], &long(LONG, 1998)].concat();
    assert_eq!(after(&second), too_long(1998, 1997));
    assert_eq!(after(&[MORE, 0].repeat(7)), Err(ZmtpProtocolError::TooManyParts(6)));
}

#[test]
fn malformed_frames_are_rejected() {
    let after = |frames: &[u8]| decode(&with_greeting(frames), &[1], LIMITS);
    assert_eq!(after(&[8, 0]), Err(ZmtpProtocolError::Flags(8)));
    assert_eq!(after(&[COMMAND | MORE, 0]), Err(ZmtpProtocolError::Flags(5)));
    assert_eq!(after(&[COMMAND, 0]), Err(ZmtpProtocolError::Command("without a name")));
    assert_eq!(after(b"\x04\x06\x04PING\0"), Err(ZmtpProtocolError::Command("PING")));
    assert_eq!(after(b"\x04\x06\x05READY"), Err(ZmtpProtocolError::SocketType));
    assert_eq!(after(b"\x04\x08\x05READY\x0bS"), Err(ZmtpProtocolError::Command("READY")));
}

#[test]
fn a_heartbeat_may_arrive_between_two_parts() {
    let stream = with_greeting(b"\x01\x01a\x04\x07\x04PING\0\x0a\0\x01b");
    let ping = DecodedItem::Command(ZmtpCommand::Ping { ttl: 10, context: Bytes::new() });
    let message = DecodedItem::Message([Bytes::from("a"), Bytes::from("b")].into());
    assert_eq!(decode(&stream, &[1], LIMITS).unwrap()[1..], [ping, message]);
}

#[test]
fn payloads_are_not_copied() {
    let mut decoder = ZmtpDecoder::new(ZmtpLimits::default());
    decoder.buffer().extend_from_slice(&with_greeting(b"\0\x05hello"));
    assert!(matches!(decoder.decode(), Ok(Some(DecodedItem::Greeting(_)))));
    let body = decoder.buffer()[2..].as_ptr();
    let Ok(Some(DecodedItem::Message(message))) = decoder.decode() else { panic!("no message") };
    assert_eq!(message.parts()[0].as_ptr(), body);
}
