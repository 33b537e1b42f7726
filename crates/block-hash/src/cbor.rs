//! Encoder for canonical CBOR (RFC 8949, section 4.2.1) as hashed by `sha256_cbor`: byte strings, text, numbers, arrays, null.

/// Encoding of the null value.
pub(crate) const NULL: u8 = 0xf6;
const UNSIGNED: u8 = 0x00;
const NEGATIVE: u8 = 0x20;
const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;

/// Writes a major type with its argument in the shortest form.
fn head(out: &mut Vec<u8>, major: u8, argument: u64) {
    let bytes = argument.to_be_bytes();
    match argument {
        0..24 => out.push(major | bytes[7]),
        24..0x100 => out.extend_from_slice(&[major | 24, bytes[7]]),
        0x100..0x1_0000 => out.extend_from_slice(&[major | 25, bytes[6], bytes[7]]),
        0x1_0000..0x1_0000_0000 => {
            out.push(major | 26);
            out.extend_from_slice(&bytes[4..]);
        }
        _ => {
            out.push(major | 27);
            out.extend_from_slice(&bytes);
        }
    }
}

/// Writes a number in the shortest form.
pub(crate) fn unsigned(out: &mut Vec<u8>, number: u64) {
    head(out, UNSIGNED, number);
}

/// Writes a number that may be negative.
pub(crate) fn signed(out: &mut Vec<u8>, number: i64) {
    match u64::try_from(number) {
        Ok(number) => unsigned(out, number),
        Err(_) => head(out, NEGATIVE, number.unsigned_abs() - 1),
    }
}

/// Writes the start of an array of `length` items.
pub(crate) fn array(out: &mut Vec<u8>, length: usize) {
    head(out, ARRAY, length as u64);
}

/// Writes a byte string with its length.
pub(crate) fn bytes(out: &mut Vec<u8>, content: &[u8]) {
    head(out, BYTES, content.len() as u64);
    out.extend_from_slice(content);
}

/// Writes a text string with its length.
pub(crate) fn text(out: &mut Vec<u8>, content: &str) {
    head(out, TEXT, content.len() as u64);
    out.extend_from_slice(content.as_bytes());
}

/// Writes an array of token ids.
pub(crate) fn tokens(out: &mut Vec<u8>, tokens: &[u32]) {
    array(out, tokens.len());
    for &token in tokens {
        unsigned(out, u64::from(token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_the_shortest_form() {
        let encoded = |number| {
            let mut out = Vec::new();
            unsigned(&mut out, number);
            out
        };
        assert_eq!(encoded(23), [23]);
        assert_eq!(encoded(24), [0x18, 24]);
        assert_eq!(encoded(255), [0x18, 255]);
        assert_eq!(encoded(256), [0x19, 1, 0]);
        assert_eq!(encoded(65_536), [0x1a, 0, 1, 0, 0]);
        assert_eq!(encoded(1 << 32), [0x1b, 0, 0, 0, 1, 0, 0, 0, 0]);
    }
}
