//! The DEALER socket, as a client that sends one request and reads many replies.

use bytes::Bytes;

use crate::codec::{ZmtpMessage, ZmtpSocketType};
use crate::connection::ZmtpConnection;
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// Sends a request to a ROUTER or REP socket, after an empty part as from a REQ socket.
///
/// Each request has its own connection, so replies to an abandoned request cannot be mistaken for those of another.
///
/// # Errors
/// If the connection is not established within [`ZmtpOptions::connect_timeout`].
pub async fn request(
    endpoint: &ZmtpEndpoint,
    body: ZmtpMessage,
    options: &ZmtpOptions,
) -> Result<ZmtpReplies, ZmtpError> {
    let mut connection = ZmtpConnection::dial(endpoint, ZmtpSocketType::Dealer, options).await?;
    connection.queue(&[Bytes::new()], &body);
    connection.flush().await?;
    Ok(ZmtpReplies { connection })
}

/// Replies to one [`request`]. Dropping this closes the connection.
///
/// ZMTP does not mark the last reply: the protocol above must.
#[derive(Debug)]
pub struct ZmtpReplies {
    connection: ZmtpConnection,
}

impl ZmtpReplies {
    /// Waits for the next reply, without a timeout; removes the parts up to the first empty one. Cancel-safe.
    ///
    /// # Errors
    /// [`ZmtpError::Closed`] if the peer has disconnected, or another connection error.
    pub async fn recv(&mut self) -> Result<ZmtpMessage, ZmtpError> {
        let (_, body) = split_envelope(self.connection.next_message().await?);
        Ok(body)
    }
}

/// Splits a message after its first empty part. Without one, the whole message is the body.
pub(crate) fn split_envelope(message: ZmtpMessage) -> (Vec<Bytes>, ZmtpMessage) {
    let mut parts = message.into_parts();
    let envelope = parts.iter().position(Bytes::is_empty).map_or(0, |delimiter| delimiter + 1);
    let body = parts.split_off(envelope);
    (parts, ZmtpMessage::new(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_empty_part_ends_the_envelope() {
        let split = |parts: &[&'static str]| {
            let parts = parts.iter().map(|part| Bytes::from(*part)).collect();
            let (envelope, body) = split_envelope(ZmtpMessage::new(parts));
            (envelope.len(), body.parts().len())
        };
        assert_eq!(split(&["", "a", "", "b"]), (1, 3));
        assert_eq!(split(&["hop", "", "a"]), (2, 1));
        assert_eq!(split(&["a", "b"]), (0, 2));
        assert_eq!(split(&[""]), (1, 1), "a body has at least one, possibly empty, part");
    }
}
