//! Splits a peer's byte stream into greeting, commands and messages.

use bytes::{Buf, Bytes, BytesMut};

use super::greeting::check_start;
use super::{COMMAND, GREETING_BYTES, LONG, MORE, ZmtpCommand, ZmtpGreeting, ZmtpMessage, ZmtpProtocolError};

/// Limits on what a peer may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpLimits {
    /// Maximum bytes of one message, all parts together.
    pub message_bytes: usize,
    /// Maximum number of parts of one message.
    pub parts: usize,
    /// Maximum bytes of one command.
    pub command_bytes: usize,
}

impl Default for ZmtpLimits {
    /// A batch of KV events of a full 1 M token prompt is about 5 MB.
    fn default() -> Self {
        Self { message_bytes: 16 << 20, parts: 16, command_bytes: 4 << 10 }
    }
}

/// A complete item of the peer's byte stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodedItem {
    /// The greeting, once, as the first item.
    Greeting(ZmtpGreeting),
    /// A handshake, subscription or heartbeat command.
    Command(ZmtpCommand),
    /// A message with all its parts.
    Message(ZmtpMessage),
}

/// Incremental decoder: returns items as soon as their bytes are complete.
///
/// Payloads are slices of [`buffer`](Self::buffer), not copies. Memory grows with the bytes received, never with a length declared by the
/// peer, and is bounded by [`ZmtpLimits`].
#[derive(Debug)]
pub struct ZmtpDecoder {
    limits: ZmtpLimits,
    buffer: BytesMut,
    has_greeting: bool,
    /// Parts of the incomplete message.
    parts: Vec<Bytes>,
    parts_bytes: usize,
}

impl ZmtpDecoder {
    /// A decoder for a new connection.
    pub fn new(limits: ZmtpLimits) -> Self {
        Self { limits, buffer: BytesMut::new(), has_greeting: false, parts: Vec::new(), parts_bytes: 0 }
    }

    /// Buffer for received bytes. Call [`decode`](Self::decode) until it returns `None` before appending more.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next complete item, or `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`ZmtpProtocolError`]. The stream cannot be decoded any further.
    pub fn decode(&mut self) -> Result<Option<DecodedItem>, ZmtpProtocolError> {
        if !self.has_greeting {
            return self.greeting();
        }
        while let Some((flags, body)) = self.frame()? {
            if flags & COMMAND != 0 {
                // libzmq may send a heartbeat between two parts of a message.
                return Ok(Some(DecodedItem::Command(ZmtpCommand::decode(body)?)));
            }
            self.parts_bytes += body.len();
            self.parts.push(body);
            if flags & MORE == 0 {
                self.parts_bytes = 0;
                return Ok(Some(DecodedItem::Message(ZmtpMessage::new(std::mem::take(&mut self.parts)))));
            }
        }
        Ok(None)
    }

    fn greeting(&mut self) -> Result<Option<DecodedItem>, ZmtpProtocolError> {
        check_start(&self.buffer)?;
        let Some(bytes) = self.buffer.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
        let greeting = ZmtpGreeting::decode(bytes)?;
        self.buffer.advance(GREETING_BYTES);
        self.has_greeting = true;
        Ok(Some(DecodedItem::Greeting(greeting)))
    }

    /// Flags and body of the next frame, if complete. Limits are checked as soon as its header has arrived.
    fn frame(&mut self) -> Result<Option<(u8, Bytes)>, ZmtpProtocolError> {
        let Some(&flags) = self.buffer.first() else { return Ok(None) };
        let is_command = flags & COMMAND != 0;
        if flags & !(MORE | LONG | COMMAND) != 0 || (is_command && flags & MORE != 0) {
            return Err(ZmtpProtocolError::Flags(flags));
        }
        let (header, length) = if flags & LONG == 0 {
            let Some(&length) = self.buffer.get(1) else { return Ok(None) };
            (2, u64::from(length))
        } else {
            let Some(length) = self.buffer.get(1..).and_then(|rest| rest.first_chunk()) else {
                return Ok(None);
            };
            (9, u64::from_be_bytes(*length))
        };
        let left =
            if is_command { self.limits.command_bytes } else { self.limits.message_bytes - self.parts_bytes };
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= left) else {
            return Err(ZmtpProtocolError::TooLong { length, left });
        };
        if !is_command && self.parts.len() >= self.limits.parts {
            return Err(ZmtpProtocolError::TooManyParts(self.limits.parts));
        }
        if self.buffer.len() - header < length {
            return Ok(None);
        }
        self.buffer.advance(header);
        Ok(Some((flags, self.buffer.split_to(length).freeze())))
    }
}
