//! What Python's pickle, protocol 5, writes for the values that vLLM's `sha256` hashes.
//!
//! A pickle is a header, a frame with its length, and instructions for a stack machine. Every string, byte string and
//! tuple is followed by MEMOIZE. All values here fit in one frame: Python begins another one at 64 KiB, which the
//! bounds on pages and extra keys rule out.

const HEADER: [u8; 3] = [0x80, 5, 0x95];
/// Header and length of the frame.
const FRAME_START: usize = 11;
const SHORT_BYTES: u8 = 0x43;
const SHORT_TEXT: u8 = 0x8c;
const TEXT: u8 = b'X';
const MEMOIZE: u8 = 0x94;
const NONE: u8 = b'N';
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLE: u8 = b't';
/// Tuples of one, two and three items have instructions of their own, without a mark.
const TUPLE1: u8 = 0x85;
const STOP: u8 = b'.';

/// Begins a pickle in an empty buffer.
pub(crate) fn begin(out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&HEADER);
    out.extend_from_slice(&[0; 8]);
}

/// Ends the pickle that [`begin`] began.
pub(crate) fn finish(out: &mut Vec<u8>) {
    out.push(STOP);
    let length = out.len().saturating_sub(FRAME_START) as u64;
    if let Some(field) = out.get_mut(HEADER.len()..FRAME_START) {
        field.copy_from_slice(&length.to_le_bytes());
    }
}

/// A 32-byte string.
pub(crate) fn digest(out: &mut Vec<u8>, content: &[u8; 32]) {
    out.extend_from_slice(&[SHORT_BYTES, 32]);
    out.extend_from_slice(content);
    out.push(MEMOIZE);
}

/// A string.
pub(crate) fn text(out: &mut Vec<u8>, content: &str) {
    match u8::try_from(content.len()) {
        Ok(length) => out.extend_from_slice(&[SHORT_TEXT, length]),
        Err(_) => {
            out.push(TEXT);
            out.extend_from_slice(&(content.len() as u32).to_le_bytes());
        }
    }
    out.extend_from_slice(content.as_bytes());
    out.push(MEMOIZE);
}

/// `None`.
pub(crate) fn none(out: &mut Vec<u8>) {
    out.push(NONE);
}

/// What stands before the items of a tuple of `length`.
pub(crate) fn begin_tuple(out: &mut Vec<u8>, length: usize) {
    if length > 3 {
        out.push(MARK);
    }
}

/// What stands behind the items of a tuple of `length`.
pub(crate) fn end_tuple(out: &mut Vec<u8>, length: usize) {
    match length {
        0 => return out.push(EMPTY_TUPLE),
        1..=3 => out.push(TUPLE1 + (length as u8 - 1)),
        _ => out.push(TUPLE),
    }
    out.push(MEMOIZE);
}

/// A tuple of token ids.
pub(crate) fn tokens(out: &mut Vec<u8>, tokens: &[u32]) {
    begin_tuple(out, tokens.len());
    for &token in tokens {
        let bytes = token.to_le_bytes();
        match token {
            0..0x100 => out.extend_from_slice(&[b'K', bytes[0]]),
            0x100..0x1_0000 => out.extend_from_slice(&[b'M', bytes[0], bytes[1]]),
            0x1_0000..0x8000_0000 => {
                out.push(b'J');
                out.extend_from_slice(&bytes);
            }
            // LONG1: five bytes, so that the sign bit stays clear.
            _ => {
                out.extend_from_slice(&[0x8a, 5]);
                out.extend_from_slice(&bytes);
                out.push(0);
            }
        }
    }
    end_tuple(out, tokens.len());
}
