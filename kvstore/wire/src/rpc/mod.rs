//! The RPCs of Mooncake's master.
//!
//! A server looks up a request's function id ([`RpcMethod::from_function_id`]), determines from the body the possible dialects
//! ([`RpcMethod::request_dialects`]), chooses one, decodes the request in it ([`Request::decode`]) and encodes the reply in it
//! ([`encode_reply`]). A client encodes its request in the assumed dialect of the server ([`encode_request`]); a server of another
//! release either rejects the arguments ([`crate::frame::RpcFault::INVALID_ARGUMENT`]) or replies in its own dialect, which
//! [`decode_reply`] detects.

mod arguments;
mod method;
mod request;
mod table;
mod unsupported;

use bytes::BytesMut;

pub use arguments::*;
pub use method::*;
pub use request::Request;
pub use unsupported::{unsupported_fault, unsupported_function};

use crate::dialect::{Dialect, DialectSet};
use crate::frame::{self, RequestHeader, ResponseHeader};
use crate::pack::{self, Pack, PackError, Unpack, UnpackError};

/// Attachment of a node's registration calls if a holder preserves its memory and listening sockets while no process of the node
/// runs: readers then wait for its restart instead of failing. Mooncake's master ignores attachments.
pub const MEMORY_RETAINED: &[u8] = b"moongate:returns";
/// As [`MEMORY_RETAINED`], for a node that is about to be replaced: it accepts no new objects.
pub const NODE_DRAINED: &[u8] = b"moongate:drained";
/// Attachment of heartbeats on a connection that carries nothing else: it closes only when the node's process ends or the network
/// fails. Mooncake's clients use any pooled connection for a heartbeat, and may close it at any time.
pub const HEARTBEATS_ONLY: &[u8] = b"moongate:heartbeats-only";

fn encode_arguments<T: Pack>(
    method: RpcMethod,
    sequence: u32,
    dialect: Dialect,
    arguments: &T,
    out: &mut BytesMut,
) -> Result<(), PackError> {
    if dialect < method.since() {
        return Err(PackError::NotInDialect { what: method.name(), dialect });
    }
    let header = RequestHeader { sequence, function_id: method.function_id() };
    frame::write_request(out, header, |out| {
        let signature = method.arguments_signature(dialect);
        if signature.literal().is_empty() {
            return Ok(());
        }
        pack::encode(arguments, signature, dialect, out)
    })
}

fn decode_body<'a, T: Unpack<'a>>(
    method: RpcMethod,
    dialect: Dialect,
    body: &'a [u8],
) -> Result<T, UnpackError> {
    if dialect < method.since() {
        return Err(UnpackError::UnknownForm(method.name()));
    }
    let signature = method.arguments_signature(dialect);
    if signature.literal().is_empty() {
        return match body.len() {
            0 => T::read(&mut pack::PackReader::empty(dialect)),
            extra => Err(UnpackError::TrailingBytes(extra)),
        };
    }
    pack::decode(body, signature, dialect)
}

/// Appends a frame with a request. The response will carry the same `sequence`.
///
/// # Errors
/// When the dialect has no such request. Then nothing is appended.
pub fn encode_request<M: RpcDefinition, S>(
    sequence: u32,
    dialect: Dialect,
    arguments: &M::Arguments<S>,
    out: &mut BytesMut,
) -> Result<(), PackError>
where
    M::Arguments<S>: Pack,
{
    encode_arguments(M::METHOD, sequence, dialect, arguments, out)
}

/// Reads the body of a request.
///
/// # Errors
/// When it does not have the dialect's layout of this RPC's arguments.
pub fn decode_arguments<'a, M: RpcDefinition, S>(
    dialect: Dialect,
    body: &'a [u8],
) -> Result<M::Arguments<S>, UnpackError>
where
    M::Arguments<S>: Unpack<'a>,
{
    decode_body(M::METHOD, dialect, body)
}

/// Appends a frame with the reply to a request, in the request's dialect.
///
/// # Errors
/// When the dialect cannot express the reply, for example an unsupported replica medium. Then nothing is appended.
pub fn encode_reply<M: RpcDefinition, S>(
    sequence: u32,
    dialect: Dialect,
    reply: &M::Reply<S>,
    out: &mut BytesMut,
) -> Result<(), PackError>
where
    M::Reply<S>: Pack,
{
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(reply, M::METHOD.reply_signature(dialect), dialect, out)
    })
}

/// Reads the body of a reply in any dialect, and returns the dialects that it is valid in.
///
/// # Errors
/// When it has none of the known layouts.
pub fn decode_reply<'a, M: RpcDefinition, S>(body: &'a [u8]) -> Result<(M::Reply<S>, DialectSet), UnpackError>
where
    M::Reply<S>: Unpack<'a>,
{
    let dialects = M::METHOD.reply_dialects(body);
    // Dialects with the same hash have the same layout, so any of them is correct.
    let dialect = dialects.newest().ok_or(UnpackError::UnknownForm(M::METHOD.name()))?;
    let reply = pack::decode(body, M::METHOD.reply_signature(dialect), dialect)?;
    Ok((reply, dialects))
}

#[cfg(test)]
mod tests;
