//! Round trips of the arguments and replies of every RPC in every dialect.
//!
//! Values are generated from type literals, so that every type is covered.

use bytes::BytesMut;
use proptest::prelude::*;

use super::ClientArguments;
use super::table::rpcs;
use super::{Request, RpcDefinition, RpcMethod, decode_reply, encode_reply};
use crate::dialect::Dialect;
use crate::frame::{self, FrameParseResult, RequestHeader, ResponseHeader};
use crate::pack::{TypeSignature, UnpackError, type_marker};

const LIMIT: usize = 1 << 20;

/// Writes a random value of the type at the start of `literal`, and removes that type. Lengths have one byte.
fn value(literal: &mut &[u8], entropy: &mut impl Iterator<Item = u8>, out: &mut Vec<u8>) {
    let (marker, rest) = literal.split_first().unwrap();
    *literal = rest;
    let mut random = || entropy.next().unwrap();
    match *marker {
        0x06 => out.push(random()),
        0x08 => out.extend([random(), random()]),
        0x01 | 0x02 => out.extend([random(), random(), random(), random()]),
        0x03 | 0x04 => out.extend((0..8).map(|_| random())),
        0x0b => out.push(random() % 2),
        0x80 => {
            *literal = &literal[1..];
            let length = random() % 20;
            out.push(length);
            out.extend((0..length).map(|_| b'a' + random() % 26));
        }
        // With more than one entry, a map could be re-encoded in another order.
        type_marker::MAP => container(2, random() % 2, literal, entropy, out),
        type_marker::VECTOR => container(1, random() % 3, literal, entropy, out),
        type_marker::OPTIONAL => container(1, random() % 2, literal, entropy, out),
        type_marker::VARIANT => {
            let (chosen, start) = (usize::from(random()), out.len());
            let mut alternatives = Vec::new();
            while literal[0] != type_marker::END {
                let mut alternative = Vec::new();
                value(literal, entropy, &mut alternative);
                alternatives.push(alternative);
            }
            *literal = &literal[1..];
            let chosen = chosen % alternatives.len();
            out.insert(start, u8::try_from(chosen).unwrap());
            out.extend(&alternatives[chosen]);
        }
        type_marker::EXPECTED => {
            let is_ok = random() % 2;
            let (mut value_bytes, mut error_bytes) = (Vec::new(), Vec::new());
            value(literal, entropy, &mut value_bytes);
            value(literal, entropy, &mut error_bytes);
            out.push(is_ok);
            out.extend(if is_ok == 1 { value_bytes } else { error_bytes });
        }
        type_marker::VOID => {}
        type_marker::STRUCT => {
            let (start, is_plain) = (out.len(), is_plain_struct(literal));
            while literal[0] != type_marker::END {
                if literal[0] == type_marker::ALIGNED_8 {
                    *literal = &literal[1..];
                    continue;
                }
                if is_plain && matches!(literal[0], 0x03 | 0x04) {
                    out.resize(start + (out.len() - start).next_multiple_of(8), 0);
                }
                value(literal, entropy, out);
            }
            *literal = &literal[1..];
        }
        other => panic!("unknown mark {other:#04x}"),
    }
}

/// Whether the fields at the start of `literal` are those of a struct that is copied as it is in memory.
fn is_plain_struct(literal: &[u8]) -> bool {
    let fields = literal.split(|marker| *marker == type_marker::END).next().unwrap();
    fields.ends_with(&[type_marker::ALIGNED_8]) && !fields.contains(&type_marker::STRUCT)
}

fn container(
    types: usize,
    count: u8,
    literal: &mut &[u8],
    entropy: &mut impl Iterator<Item = u8>,
    out: &mut Vec<u8>,
) {
    out.push(count);
    let element = *literal;
    for _ in 0..types {
        value(literal, entropy, &mut Vec::new());
    }
    for _ in 0..count {
        let mut element = element;
        for _ in 0..types {
            value(&mut element, entropy, out);
        }
    }
}

/// A packed value, optionally with the type literal that debug builds send.
fn packed(signature: &TypeSignature, entropy: &[u8], debug: bool) -> Vec<u8> {
    let mut literal = signature.literal();
    if literal.is_empty() {
        return Vec::new();
    }
    let mut out = (signature.hash() | u32::from(debug)).to_le_bytes().to_vec();
    if debug {
        out.push(1 << 2);
        out.extend(literal);
        out.push(0);
    }
    // Each pass over the entropy yields different numbers.
    let mut step = 0_usize;
    let mut stream = std::iter::repeat_with(move || {
        step += 1;
        entropy[step % entropy.len()].wrapping_add(u8::try_from((step / entropy.len()) % 251).unwrap())
    });
    value(&mut literal, &mut stream, &mut out);
    assert!(literal.is_empty());
    out
}

fn check_request(method: RpcMethod, dialect: Dialect, entropy: &[u8]) {
    let body = packed(method.arguments_signature(dialect), entropy, false);
    let request = Request::<&str>::decode(method, dialect, &body).unwrap();
    let mut out = BytesMut::new();
    request.encode(1, dialect, &mut out).unwrap();
    let FrameParseResult::Frame(frame) = frame::parse::<RequestHeader>(&out, LIMIT).unwrap() else {
        panic!()
    };
    check_encoded(frame.body, &body, method.arguments_signature(dialect));
    assert!(method.request_dialects(frame.body).contains(dialect));
    // The message of a debug build decodes to the same request.
    let debug = packed(method.arguments_signature(dialect), entropy, true);
    assert_eq!(Request::<&str>::decode(method, dialect, &debug).as_ref(), Ok(&request));
    // The newest dialect can express every request of older ones.
    let mut newest = BytesMut::new();
    request.encode(1, Dialect::NEWEST, &mut newest).unwrap();
    let FrameParseResult::Frame(frame) = frame::parse::<RequestHeader>(&newest, LIMIT).unwrap() else {
        panic!()
    };
    assert_eq!(Request::<&str>::decode(method, Dialect::NEWEST, frame.body), Ok(request));
}

/// Compares an encoded value with generated bytes, which lack compatible members and their size.
fn check_encoded(encoded: &[u8], generated: &[u8], signature: &TypeSignature) {
    if !signature.has_compatible() {
        assert_eq!(encoded, generated);
        return;
    }
    let size = u16::from_le_bytes([encoded[5], encoded[6]]);
    assert_eq!(usize::from(size), encoded.len());
    let fields = &generated[4..];
    assert_eq!(&encoded[7..7 + fields.len()], fields);
    assert!(encoded[7 + fields.len()..].iter().all(|absent| *absent == 0));
}

/// Every truncated body is rejected, and decoding corrupted bodies never panics.
fn check_damage(method: RpcMethod, dialect: Dialect, entropy: &[u8], at: usize, to: u8) {
    let mut body = packed(method.arguments_signature(dialect), entropy, false);
    for end in (0..body.len()).step_by(if cfg!(miri) { 17 } else { 1 }) {
        assert!(Request::<&str>::decode(method, dialect, &body[..end]).is_err(), "{method:?} in {dialect}");
    }
    if let Some(length) = body.len().checked_sub(4).filter(|length| *length > 0) {
        body[4 + at % length] = to;
        let _ = Request::<&str>::decode(method, dialect, &body);
        body[0] |= 1;
        let _ = Request::<&str>::decode(method, dialect, &body);
    }
}

macro_rules! replies {
    ($($(#[$meta:meta])* $method:ident($arguments:ty) -> $reply:ty $(, since $since:ident)?;)+) => {
        fn check_reply(method: RpcMethod, dialect: Dialect, entropy: &[u8], at: usize, to: u8) {
            match method {
                $(RpcMethod::$method => check_reply_of!($method, dialect, entropy, at, to),)+
            }
        }
    };
}

macro_rules! check_reply_of {
    ($method:ident, $dialect:ident, $entropy:ident, $at:ident, $to:ident) => {{
        type Of = super::$method;
        let mut body = packed(Of::METHOD.reply_signature($dialect), $entropy, false);
        let (reply, dialects) = decode_reply::<Of, &str>(&body).unwrap();
        assert!(!dialects.is_empty());
        let mut out = BytesMut::new();
        encode_reply::<Of, &str>(1, $dialect, &reply, &mut out).unwrap();
        let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else {
            panic!()
        };
        check_encoded(frame.body, &body, Of::METHOD.reply_signature($dialect));
        for end in (0..body.len()).step_by(if cfg!(miri) { 17 } else { 1 }) {
            assert!(decode_reply::<Of, &str>(&body[..end]).is_err(), "{:?} in {}", Of::METHOD, $dialect);
        }
        let length = body.len() - 4;
        body[4 + $at % length] = $to;
        let _ = decode_reply::<Of, &str>(&body);
    }};
}

rpcs!(replies);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 64 }))]

    #[test]
    fn requests_round_trip(entropy in prop::collection::vec(any::<u8>(), 7..200), at: usize, to: u8) {
        for method in RpcMethod::ALL {
            for dialect in method.dialects().iter() {
                check_request(*method, dialect, &entropy);
                check_damage(*method, dialect, &entropy, at, to);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "every reply in every dialect takes minutes")]
    fn replies_round_trip(entropy in prop::collection::vec(any::<u8>(), 7..200), at: usize, to: u8) {
        for method in RpcMethod::ALL {
            for dialect in method.dialects().iter() {
                check_reply(*method, dialect, &entropy, at, to);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_rejected(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for method in RpcMethod::ALL {
            prop_assert!(Request::<&str>::decode(*method, Dialect::NEWEST, &bytes).is_err() || bytes.is_empty());
        }
        let _ = frame::RpcFault::parse(4, &bytes);
        let _ = frame::RpcFault::parse(255, &bytes);
    }
}

#[test]
fn oversized_count_is_rejected_before_allocation() {
    let signature = RpcMethod::BatchExistKey.arguments_signature(Dialect::NEWEST);
    // Lengths of eight bytes, the first one with the maximum value.
    let mut body = (signature.hash() | 1).to_le_bytes().to_vec();
    body.push(3 << 3);
    body.extend([0xff; 8]);
    body.extend([0; 30]);
    let rejected = Request::<&str>::decode(RpcMethod::BatchExistKey, Dialect::NEWEST, &body);
    assert_eq!(rejected, Err(UnpackError::Truncated));
}

#[test]
fn rpcs_missing_in_a_release_are_rejected() {
    let request = Request::PollRemoveAll(ClientArguments { client_id: crate::types::Uuid::default() });
    let mut out = BytesMut::from(&b"before"[..]);
    assert!(Request::<&str>::encode(&request, 1, Dialect::V0_3_11, &mut out).is_err());
    assert_eq!(&out[..], b"before");
    request.encode(1, Dialect::V0_3_12, &mut out).unwrap();
    let body = &out[6 + 20..];
    assert!(!RpcMethod::PollRemoveAll.request_dialects(body).contains(Dialect::V0_3_11));
    assert!(Request::<&str>::decode(RpcMethod::PollRemoveAll, Dialect::V0_3_11, body).is_err());
    assert_eq!(Request::decode(RpcMethod::PollRemoveAll, Dialect::V0_3_12, body), Ok(request));
}
