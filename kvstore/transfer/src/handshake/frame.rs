//! Framing of messages on the handshake port.

use std::io;

use moongate_runtime::{TLS_REQUIRED, is_tls_alert};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::descriptor::MAX_DESCRIPTOR;

/// Type of a handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandshakeKind {
    /// Queue pairs for an RDMA connection.
    Connection,
    /// Both sides exchange their descriptors.
    Metadata,
    /// A notification from one application to another.
    Notify,
    /// A liveness probe of the node.
    Probe,
    /// As `Connection`, from releases without message types.
    Legacy,
}

impl HandshakeKind {
    fn code(self) -> Option<u8> {
        match self {
            Self::Connection => Some(0),
            Self::Metadata => Some(1),
            Self::Notify => Some(2),
            Self::Probe => Some(3),
            Self::Legacy => None,
        }
    }

    fn from_first_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Connection,
            1 => Self::Metadata,
            2 => Self::Notify,
            3 => Self::Probe,
            _ => Self::Legacy,
        }
    }
}

/// Encodes a message with its length prefix.
#[must_use]
pub fn encode(kind: HandshakeKind, json: &[u8]) -> Vec<u8> {
    let code = kind.code();
    let length = json.len() as u64 + u64::from(code.is_some());
    let mut bytes = Vec::with_capacity(9 + json.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend(code);
    bytes.extend_from_slice(json);
    bytes
}

/// Reads a message; returns its type and its JSON.
///
/// # Errors
/// Errors of the stream, and `InvalidData` for a length out of range.
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(HandshakeKind, Vec<u8>)> {
    let length = read_length(stream).await?;
    let length = usize::try_from(length).ok().filter(|length| (1..=MAX_DESCRIPTOR + 1).contains(length));
    let Some(length) = length else {
        let problem = format!("a handshake message must have 1 to {MAX_DESCRIPTOR} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    };
    // Grows with the bytes received, not with the announced length.
    let mut body = Vec::new();
    stream.take(length as u64).read_to_end(&mut body).await?;
    if body.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let kind = body.first().map_or(HandshakeKind::Legacy, |first| HandshakeKind::from_first_byte(*first));
    if kind != HandshakeKind::Legacy {
        body.remove(0);
    }
    Ok((kind, body))
}

async fn read_length(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<u64> {
    let mut length = [0; 8];
    let mut filled = 0;
    while let Some(rest) = length.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let read = stream.read(rest).await;
        match read {
            Ok(more @ 1..) => filled += more,
            // A TLS alert is shorter than a length prefix.
            _ if is_tls_alert(&length) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, TLS_REQUIRED));
            }
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(u64::from_le_bytes(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(bytes: &[u8]) -> io::Result<(HandshakeKind, Vec<u8>)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(read(&mut &*bytes))
    }

    #[test]
    fn lengths_count_the_kind() {
        assert_eq!(encode(HandshakeKind::Metadata, b"{}"), [3, 0, 0, 0, 0, 0, 0, 0, 1, b'{', b'}']);
        assert_eq!(encode(HandshakeKind::Legacy, b"{}"), [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']);
    }

    #[test]
    fn lengths_out_of_range_are_rejected() {
        for length in [0, (MAX_DESCRIPTOR + 2) as u64, u64::MAX] {
            let error = parse(&length.to_le_bytes()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{length}");
        }
        let error = parse(&[9, 0, 0, 0, 0, 0, 0, 0, 1, b'{']).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn messages_survive_the_round_trip(
            kind in prop::sample::select(vec![HandshakeKind::Connection, HandshakeKind::Metadata, HandshakeKind::Notify, HandshakeKind::Probe, HandshakeKind::Legacy]),
            text in ".{0,200}",
        ) {
            let json = format!("{{{text}}}").into_bytes();
            prop_assert_eq!(parse(&encode(kind, &json)).unwrap(), (kind, json));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse(&bytes);
        }
    }
}
