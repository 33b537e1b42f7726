//! Compatible members: values that end early, extend further than known, or need a wide size.

use bytes::BytesMut;

use super::{TypeSignature, UnpackError, decode, encode, layout};
use crate::dialect::Dialect;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Element {
    number: u32,
    first: Option<u32>,
    second: Option<u32>,
}

layout! { Element { number } compatible since V0_3_14 { first, second } }

const NEW: Dialect = Dialect::V0_3_14;

fn signature(dialect: Dialect) -> TypeSignature {
    TypeSignature::of::<Vec<Element>>(dialect)
}

fn packed(elements: &Vec<Element>, dialect: Dialect) -> BytesMut {
    let mut out = BytesMut::from(&b"before"[..]);
    encode(elements, &signature(dialect), dialect, &mut out).unwrap();
    out.split_off(b"before".len())
}

fn unpacked(bytes: &[u8], dialect: Dialect) -> Result<Vec<Element>, UnpackError> {
    decode(bytes, &signature(dialect), dialect)
}

fn elements(count: u32) -> Vec<Element> {
    let member =
        |number: u32| Element { number, first: Some(number), second: number.is_multiple_of(2).then_some(7) };
    (0..count).map(member).collect()
}

/// Offset of the size, which has two bytes here.
const SIZE: std::ops::Range<usize> = 5..7;

#[test]
fn members_of_all_elements_follow_the_fields() {
    let all = elements(2);
    let bytes = packed(&all, NEW);
    let fields = [2, 0, 0, 0, 0, 1, 0, 0, 0];
    let members = [1, 0, 0, 0, 0, 1, 7, 0, 0, 0, 1, 1, 0, 0, 0, 0];
    assert_eq!(bytes[SIZE.end..], [&fields[..], &members].concat());
    assert_eq!(unpacked(&bytes, NEW), Ok(all.clone()));
    assert_eq!(signature(NEW).hash(), signature(Dialect::V0_3_13).hash());
    // An older release has no members, and ignores them.
    let plain: Vec<_> =
        all.iter().map(|element| Element { number: element.number, ..Element::default() }).collect();
    assert_eq!(unpacked(&bytes, Dialect::V0_3_13), Ok(plain.clone()));
    let old = packed(&all, Dialect::V0_3_13);
    assert_eq!(old[4..], fields);
    assert_eq!(unpacked(&old, NEW), Ok(plain));
}

#[test]
fn values_may_lack_members_or_have_unknown_ones() {
    let all = elements(2);
    let mut bytes = packed(&all, NEW).to_vec();
    let set_size = |bytes: &mut Vec<u8>| {
        let size = u16::try_from(bytes.len()).unwrap();
        bytes[SIZE].copy_from_slice(&size.to_le_bytes());
    };
    bytes.extend([1, 2, 3]);
    set_size(&mut bytes);
    assert_eq!(unpacked(&bytes, NEW), Ok(all.clone()));
    // The writer's release lacks the last member.
    bytes.truncate(bytes.len() - 4);
    set_size(&mut bytes);
    assert_eq!(unpacked(&bytes, NEW), Ok(all));
    bytes.truncate(bytes.len() - 2);
    set_size(&mut bytes);
    assert_eq!(unpacked(&bytes, NEW), Err(UnpackError::Truncated), "a member is incomplete");
    bytes.pop();
    assert_eq!(unpacked(&bytes, Dialect::V0_3_13), Err(UnpackError::Truncated), "smaller than its size");
}

#[test]
fn large_values_have_a_wide_size() {
    for count in [3_000, 8_000, 20_000] {
        let all = elements(count);
        let bytes = packed(&all, NEW);
        assert_eq!(unpacked(&bytes, NEW).as_ref(), Ok(&all));
        let is_wide = bytes.len() > usize::from(u16::MAX);
        assert_eq!(bytes[4] & 0b11, if is_wide { 2 } else { 1 });
        let size = if is_wide { &bytes[5..9] } else { &bytes[SIZE] };
        let size = size.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        assert_eq!(size, bytes.len());
    }
}
