//! Encoder for Python's pickle, protocol 5, for the values that vLLM's `sha256` hashes.
//!
//! A pickle is a header, a frame with its length, and instructions for a stack machine. Every string, byte string and tuple is followed by
//! MEMOIZE. All values here fit in one frame: Python starts another one at 64 KiB, which the limits on blocks and extra keys exclude.

const HEADER: [u8; 3] = [0x80, 5, 0x95];
/// Length of the header and the frame length.
const FRAME_START: usize = 11;
const SHORT_BYTES: u8 = 0x43;
const SHORT_TEXT: u8 = 0x8c;
const TEXT: u8 = b'X';
const MEMOIZE: u8 = 0x94;
const REFERENCE: u8 = b'h';
const NONE: u8 = b'N';
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLE: u8 = b't';
/// Opcode of one-item tuples; tuples of two and three items follow. They need no mark.
const TUPLE1: u8 = 0x85;
const STOP: u8 = b'.';

/// Starts a pickle in an empty buffer.
pub(crate) fn begin(out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&HEADER);
    out.extend_from_slice(&[0; 8]);
}

/// Ends the pickle that [`begin`] started.
pub(crate) fn finish(out: &mut Vec<u8>) {
    out.push(STOP);
    let length = out.len().saturating_sub(FRAME_START) as u64;
    if let Some(field) = out.get_mut(HEADER.len()..FRAME_START) {
        field.copy_from_slice(&length.to_le_bytes());
    }
}

/// Writes a 32-byte byte string.
pub(crate) fn digest(out: &mut Vec<u8>, content: &[u8; 32]) {
    out.extend_from_slice(&[SHORT_BYTES, 32]);
    out.extend_from_slice(content);
    out.push(MEMOIZE);
}

/// Writes a text string.
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

/// Writes a reference to a value that was memoized as number `index`.
pub(crate) fn reference(out: &mut Vec<u8>, index: u8) {
    out.extend_from_slice(&[REFERENCE, index]);
}

/// Writes a number of up to 32 bits.
pub(crate) fn signed(out: &mut Vec<u8>, number: i32) {
    match (u8::try_from(number), u16::try_from(number)) {
        (Ok(byte), _) => out.extend_from_slice(&[b'K', byte]),
        (_, Ok(short)) => {
            out.push(b'M');
            out.extend_from_slice(&short.to_le_bytes());
        }
        _ => {
            out.push(b'J');
            out.extend_from_slice(&number.to_le_bytes());
        }
    }
}

/// Writes the value `None`.
pub(crate) fn none(out: &mut Vec<u8>) {
    out.push(NONE);
}

/// Writes the prefix of a tuple of `length` items.
pub(crate) fn begin_tuple(out: &mut Vec<u8>, length: usize) {
    if length > 3 {
        out.push(MARK);
    }
}

/// Writes the suffix of a tuple of `length` items.
pub(crate) fn end_tuple(out: &mut Vec<u8>, length: usize) {
    match length {
        0 => return out.push(EMPTY_TUPLE),
        1..=3 => out.push(TUPLE1 + (length as u8 - 1)),
        _ => out.push(TUPLE),
    }
    out.push(MEMOIZE);
}

/// Writes a tuple of token ids.
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
            // LONG1 with five bytes, so that the sign bit stays clear.
            _ => {
                out.extend_from_slice(&[0x8a, 5]);
                out.extend_from_slice(&bytes);
                out.push(0);
            }
        }
    }
    end_tuple(out, tokens.len());
}
