//! The protocol without I/O: greeting, commands and multipart messages as bytes.
//!
//! Each side of a connection sends a [`ZmtpGreeting`] of 64 bytes, then a READY [`ZmtpCommand`], then messages and commands.

mod command;
mod decoder;
mod error;
mod greeting;
mod message;
#[cfg(test)]
mod tests;

pub use command::{ReadyCommand, ZmtpCommand, ZmtpSocketType};
pub use decoder::{DecodedItem, ZmtpDecoder, ZmtpLimits};
pub use error::ZmtpProtocolError;
pub use greeting::{GREETING_BYTES, ZmtpGreeting};
pub use message::ZmtpMessage;

/// Frame flag: more frames of the same message follow.
const MORE: u8 = 0b001;
/// Frame flag: the length has eight bytes instead of one.
const LONG: u8 = 0b010;
/// Frame flag: the body is a command.
const COMMAND: u8 = 0b100;

/// Appends the flags and the length that precede a frame's body.
fn put_frame_header(flags: u8, length: usize, out: &mut impl bytes::BufMut) {
    match u8::try_from(length) {
        Ok(length) => {
            out.put_u8(flags);
            out.put_u8(length);
        }
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(length as u64);
        }
    }
}
