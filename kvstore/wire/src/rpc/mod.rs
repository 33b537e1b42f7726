//! The RPCs of Mooncake's master.
//!
//! A server looks a request's function id up ([`Method::from_function_id`]), learns from the body in which
//! dialects it can be meant ([`Method::request_dialects`]), settles on one, reads the request in it
//! ([`Request::decode`]) and answers in it ([`encode_reply`]). A client writes its request in the dialect that it
//! supposes the server to speak ([`encode_request`]); a server of another release either refuses the arguments
//! ([`crate::frame::RpcFault::INVALID_ARGUMENT`]) or answers in its own form, which [`decode_reply`] recognises.

mod arguments;
mod method;
mod request;
mod table;

use bytes::BytesMut;

pub use arguments::*;
pub use method::*;
pub use request::Request;

use crate::dialect::{Dialect, DialectSet};
use crate::frame::{self, RequestHeader, ResponseHeader};
use crate::pack::{self, Pack, PackError, Unpack, UnpackError};

/// What a node attaches to calls about itself whose memory and listening sockets are kept while no process of it runs:
/// whoever reads from it then has to wait, but need not do without. Mooncake's master ignores attachments.
pub const MEMORY_RETAINED: &[u8] = b"moongate:returns";
/// The same of a node that is going to be replaced: it is given nothing new.
pub const NODE_DRAINED: &[u8] = b"moongate:drained";
/// What a node attaches to heartbeats on a connection that carries nothing else: it breaks only when the node's process ends, or the
/// network to it. Clients of Mooncake take any pooled connection for a heartbeat, and may close it at any time.
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
/// When it is not in the form that the dialect has for the arguments of this RPC.
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
/// When the dialect cannot express the reply, for example a kind of replica that it does not know. Then nothing
/// is appended.
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

/// Reads the body of a reply, whatever release wrote it, and tells which that can be.
///
/// # Errors
/// When it is in none of the known forms.
pub fn decode_reply<'a, M: RpcDefinition, S>(body: &'a [u8]) -> Result<(M::Reply<S>, DialectSet), UnpackError>
where
    M::Reply<S>: Unpack<'a>,
{
    let dialects = M::METHOD.reply_dialects(body);
    // Dialects with the same hash have the same layout: any of them will do.
    let dialect = dialects.newest().ok_or(UnpackError::UnknownForm(M::METHOD.name()))?;
    let reply = pack::decode(body, M::METHOD.reply_signature(dialect), dialect)?;
    Ok((reply, dialects))
}

#[cfg(test)]
mod tests;
