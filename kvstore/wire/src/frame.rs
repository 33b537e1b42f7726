//! Frames of `coro_rpc`, the RPC transport of Mooncake's master.
//!
//! A request is a header of 20 bytes, a body and an attachment; a response has a header of 16 bytes. Numbers are
//! little-endian. Responses contain the sequence number of their request and may arrive in another order.

use bytes::{BufMut, Bytes, BytesMut};

use crate::dialect::Dialect;
use crate::pack::{self, PackError, TypeSignature, UnpackError, layout};

const MAGIC: u8 = 0x15;
const VERSION: u8 = 0;
const STRUCT_PACK: u8 = 0;
const REQUEST_HEADER: usize = 20;
/// Offset of the sequence number in a request's header.
const SEQUENCE: usize = 4;
/// Offset of the attachment's length in a request's header.
const ATTACHMENT_LENGTH: usize = 16;
const RESPONSE_HEADER: usize = 16;
/// Error value in a response's header whose fault code is in the body.
const EXTENDED_FAULT: u8 = 255;

/// Why bytes are not a frame. The connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The peer uses another protocol.
    #[error("a frame starts with {0:#04x} instead of {MAGIC:#04x}")]
    Magic(u8),
    /// The peer uses a later version.
    #[error("unsupported RPC protocol version {0}")]
    Version(u8),
    /// The peer uses another serialisation.
    #[error("unsupported serialisation {0}")]
    Serialization(u8),
    /// The frame is larger than allowed.
    #[error("a frame has {size} bytes; the limit is {limit}")]
    TooLarge {
        /// Size of body and attachment in bytes.
        size: u64,
        limit: usize,
    },
}

/// Header of a request, without lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Sequence number, chosen by the client and repeated in the response.
    pub sequence: u32,
    /// Id of the called function; see [`crate::rpc::RpcMethod::function_id`].
    pub function_id: u32,
}

/// Header of a response, without lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Sequence number of the request.
    pub sequence: u32,
    /// 0, or the code of an [`RpcFault`], which the body contains then.
    pub error: u8,
}

/// A frame, with borrowed (`&[u8]`) or shared ([`Bytes`]) bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RpcFrame<H, B> {
    pub header: H,
    /// A packed value; may be empty.
    pub body: B,
    /// Raw bytes. Mooncake's master ignores them.
    pub attachment: B,
}

impl<H, B: AsRef<[u8]>> RpcFrame<H, B>
where
    H: FrameHeader,
{
    /// Size of the whole frame in bytes.
    pub fn size(&self) -> usize {
        H::SIZE + self.body.as_ref().len() + self.attachment.as_ref().len()
    }
}

/// Result of parsing the start of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameParseResult<F> {
    Frame(F),
    /// A part of a frame. At least this many more bytes are needed.
    Incomplete(usize),
}

/// The two kinds of headers.
pub trait FrameHeader: Copy {
    /// Size of the header in bytes.
    const SIZE: usize;

    /// Parses a header of [`FrameHeader::SIZE`] bytes. Returns the header, the body's length and the attachment's length; `None` if
    /// more bytes are needed.
    ///
    /// # Errors
    /// When the bytes are not a header.
    fn parse(bytes: &[u8]) -> Result<Option<(Self, u32, u32)>, FrameError>;
}

/// The little-endian number at `offset`, if `bytes` is long enough.
fn number(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().map(|four| u32::from_le_bytes(*four))
}

fn check_start(magic: u8, version: u8) -> Result<(), FrameError> {
    match (magic, version) {
        (MAGIC, VERSION) => Ok(()),
        (MAGIC, version) => Err(FrameError::Version(version)),
        (magic, _) => Err(FrameError::Magic(magic)),
    }
}

impl FrameHeader for RequestHeader {
    const SIZE: usize = REQUEST_HEADER;

    fn parse(bytes: &[u8]) -> Result<Option<(Self, u32, u32)>, FrameError> {
        let Some([magic, version, serialization, _message_type]) = bytes.first_chunk() else {
            return Ok(None);
        };
        check_start(*magic, *version)?;
        if *serialization != STRUCT_PACK {
            return Err(FrameError::Serialization(*serialization));
        }
        let [Some(sequence), Some(function_id), Some(body), Some(attachment)] =
            [SEQUENCE, 8, 12, ATTACHMENT_LENGTH].map(|offset| number(bytes, offset))
        else {
            return Ok(None);
        };
        Ok(Some((Self { sequence, function_id }, body, attachment)))
    }
}

impl FrameHeader for ResponseHeader {
    const SIZE: usize = RESPONSE_HEADER;

    fn parse(bytes: &[u8]) -> Result<Option<(Self, u32, u32)>, FrameError> {
        let Some([magic, version, error, _message_type]) = bytes.first_chunk() else { return Ok(None) };
        check_start(*magic, *version)?;
        let [Some(sequence), Some(body), Some(attachment)] = [4, 8, 12].map(|offset| number(bytes, offset))
        else {
            return Ok(None);
        };
        Ok(Some((Self { sequence, error: *error }, body, attachment)))
    }
}

/// Parses a frame at the start of `bytes` without copying it. `limit` is the maximum size of body and attachment together, checked
/// before anything is allocated for them.
///
/// # Errors
/// When the bytes are not the start of a frame, or the frame exceeds `limit`.
pub fn parse<H: FrameHeader>(
    bytes: &[u8],
    limit: usize,
) -> Result<FrameParseResult<RpcFrame<H, &[u8]>>, FrameError> {
    let Some((header, body, attachment)) = H::parse(bytes)? else {
        return Ok(FrameParseResult::Incomplete(H::SIZE - bytes.len().min(H::SIZE - 1)));
    };
    let size = u64::from(body) + u64::from(attachment);
    if size > limit as u64 {
        return Err(FrameError::TooLarge { size, limit });
    }
    let (body, attachment) = (body as usize, attachment as usize);
    let rest = bytes.get(H::SIZE..).unwrap_or_default();
    let Some((body, rest)) = rest.split_at_checked(body) else {
        return Ok(FrameParseResult::Incomplete(body + attachment - rest.len()));
    };
    match rest.get(..attachment) {
        Some(attachment) => Ok(FrameParseResult::Frame(RpcFrame { header, body, attachment })),
        None => Ok(FrameParseResult::Incomplete(attachment - rest.len())),
    }
}

/// Splits a whole frame off the start of `buffer`, sharing its memory.
///
/// # Errors
/// As [`parse`].
pub fn take<H: FrameHeader>(
    buffer: &mut BytesMut,
    limit: usize,
) -> Result<FrameParseResult<RpcFrame<H, Bytes>>, FrameError> {
    let (header, size, body) = match parse::<H>(buffer, limit)? {
        FrameParseResult::Frame(frame) => (frame.header, frame.size(), frame.body.len()),
        FrameParseResult::Incomplete(missing) => return Ok(FrameParseResult::Incomplete(missing)),
    };
    let frame = buffer.split_to(size).freeze();
    let (body, attachment) = (frame.slice(H::SIZE..H::SIZE + body), frame.slice(H::SIZE + body..));
    Ok(FrameParseResult::Frame(RpcFrame { header, body, attachment }))
}

/// Appends a request without attachment. `body` appends the body.
///
/// # Errors
/// When `body` fails, or appends more than the maximum size of a frame. Then nothing is appended.
pub fn write_request(
    out: &mut BytesMut,
    header: RequestHeader,
    body: impl FnOnce(&mut BytesMut) -> Result<(), PackError>,
) -> Result<(), PackError> {
    write(out, body, REQUEST_HEADER, |out, size| {
        out.put_slice(&[MAGIC, VERSION, STRUCT_PACK, 0]);
        out.put_u32_le(header.sequence);
        out.put_u32_le(header.function_id);
        out.put_u32_le(size);
        out.put_u32_le(0);
    })
}

/// Adds an attachment to a request. The buffer must contain exactly one request, without attachment.
///
/// # Errors
/// When it exceeds the maximum size of a frame. Then the request is unchanged.
pub fn attach(request: &mut BytesMut, attachment: &[u8]) -> Result<(), PackError> {
    let size = u32::try_from(attachment.len()).map_err(|_| PackError::TooLarge(attachment.len()))?;
    if let Some(length) = request.get_mut(ATTACHMENT_LENGTH..REQUEST_HEADER) {
        length.copy_from_slice(&size.to_le_bytes());
        request.extend_from_slice(attachment);
    }
    Ok(())
}

/// Changes the sequence number of a request. The buffer must start with a request; otherwise nothing happens.
pub fn set_sequence(request: &mut [u8], sequence: u32) {
    if let Some(number) = request.get_mut(SEQUENCE..SEQUENCE + 4) {
        number.copy_from_slice(&sequence.to_le_bytes());
    }
}

/// Adds an attachment to the last response in a buffer, which starts at `start` and has no attachment.
///
/// # Errors
/// When it exceeds the maximum size of a frame. Then the response is unchanged.
pub fn attach_to_response(out: &mut BytesMut, start: usize, attachment: &[u8]) -> Result<(), PackError> {
    let size = u32::try_from(attachment.len()).map_err(|_| PackError::TooLarge(attachment.len()))?;
    if let Some(length) = out.get_mut(start + RESPONSE_HEADER - 4..start + RESPONSE_HEADER) {
        length.copy_from_slice(&size.to_le_bytes());
        out.extend_from_slice(attachment);
    }
    Ok(())
}

/// Appends a response without attachment. `body` appends the body.
///
/// # Errors
/// As [`write_request`].
pub fn write_response(
    out: &mut BytesMut,
    header: ResponseHeader,
    body: impl FnOnce(&mut BytesMut) -> Result<(), PackError>,
) -> Result<(), PackError> {
    write(out, body, RESPONSE_HEADER, |out, size| {
        out.put_slice(&[MAGIC, VERSION, header.error, 0]);
        out.put_u32_le(header.sequence);
        out.put_u32_le(size);
        out.put_u32_le(0);
    })
}

fn write(
    out: &mut BytesMut,
    body: impl FnOnce(&mut BytesMut) -> Result<(), PackError>,
    header_size: usize,
    header: impl FnOnce(&mut &mut [u8], u32),
) -> Result<(), PackError> {
    let start = out.len();
    out.put_bytes(0, header_size);
    let written = body(out).and_then(|()| {
        let size = out.len() - start - header_size;
        u32::try_from(size).map_err(|_| PackError::TooLarge(size))
    });
    match (written, out.get_mut(start..)) {
        (Ok(size), Some(mut frame)) => {
            header(&mut frame, size);
            Ok(())
        }
        (written, _) => {
            out.truncate(start);
            written.map(|_| ())
        }
    }
}

/// A call that failed in the transport: the function was not executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the RPC failed: {message} ({code})")]
pub struct RpcFault {
    /// Fault code: one of the constants below, or another.
    pub code: u16,
    /// Human-readable description of the fault.
    pub message: String,
}

layout! { ExtendedFault<S> { code, message } }

/// The body of a fault whose code does not fit into the header.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ExtendedFault<S> {
    code: u16,
    message: S,
}

impl RpcFault {
    /// The arguments are malformed or those of another release.
    pub const INVALID_ARGUMENT: u16 = 4;
    /// The function is not registered.
    pub const NOT_REGISTERED: u16 = 11;

    /// Fault for malformed arguments, with Mooncake's message.
    pub fn invalid_argument() -> Self {
        Self { code: Self::INVALID_ARGUMENT, message: "invalid rpc arg".to_owned() }
    }

    /// Fault for an unknown function id, with Mooncake's message.
    pub fn not_registered() -> Self {
        Self { code: Self::NOT_REGISTERED, message: "the rpc function not registered".to_owned() }
    }

    /// Appends a response with this fault.
    ///
    /// # Errors
    /// When the message exceeds the size of a frame.
    pub fn write(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let message = self.message.as_str();
        match u8::try_from(self.code) {
            Ok(error) if error != EXTENDED_FAULT => {
                write_response(out, ResponseHeader { sequence, error }, |out| {
                    let signature = TypeSignature::of::<&str>(Dialect::NEWEST);
                    pack::encode(&message, &signature, Dialect::NEWEST, out)
                })
            }
            _ => write_response(out, ResponseHeader { sequence, error: EXTENDED_FAULT }, |out| {
                let signature = TypeSignature::of::<ExtendedFault<&str>>(Dialect::NEWEST);
                let fault = ExtendedFault { code: self.code, message };
                pack::encode(&fault, &signature, Dialect::NEWEST, out)
            }),
        }
    }

    /// Decodes the fault of a response with this `error` in its header.
    ///
    /// # Errors
    /// When the body is not a fault.
    pub fn parse(error: u8, body: &[u8]) -> Result<Self, UnpackError> {
        if error == EXTENDED_FAULT {
            let signature = TypeSignature::of::<ExtendedFault<String>>(Dialect::NEWEST);
            let fault: ExtendedFault<String> = pack::decode(body, &signature, Dialect::NEWEST)?;
            return Ok(Self { code: fault.code, message: fault.message });
        }
        let signature = TypeSignature::of::<String>(Dialect::NEWEST);
        let message = pack::decode(body, &signature, Dialect::NEWEST)?;
        Ok(Self { code: u16::from(error), message })
    }
}
