//! The DEALER socket, as a client that asks once and reads many answers.

use bytes::Bytes;

use crate::codec::{ZmtpMessage, ZmtpSocketType};
use crate::connection::ZmtpConnection;
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// Asks a ROUTER or REP socket. The request travels behind an empty part, as a REQ socket sends it.
///
/// Each request has a connection of its own, so that answers to an abandoned one cannot be taken for another's.
///
/// # Errors
/// If there is no connection within [`ZmtpOptions::connect_timeout`].
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

/// Answers to one [`request`]. Dropping this closes the connection.
///
/// ZMTP has no end of an answer: which one is the last is for the protocol above to know.
#[derive(Debug)]
pub struct ZmtpReplies {
    connection: ZmtpConnection,
}

impl ZmtpReplies {
    /// The next answer, without the parts up to the first empty one. Waits for it without a limit. Cancel-safe.
    ///
    /// # Errors
    /// [`ZmtpError::Closed`] if the peer has gone, or what else broke the connection.
    pub async fn recv(&mut self) -> Result<ZmtpMessage, ZmtpError> {
        let (_, body) = split_envelope(self.connection.next_message().await?);
        Ok(body)
    }
}

/// Divides a message behind its first empty part. Without one, all of it is the body.
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
        assert_eq!(split(&[""]), (1, 1), "a body has a part, if only an empty one");
    }
}
