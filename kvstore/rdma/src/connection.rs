//! Messages that connect the queue pairs of two sides: handshakes of type 0, as JSON.

use serde::{Deserialize, Serialize};

use crate::gid::{Gid, GidError};

/// Queue pairs per connection: Mooncake's default. Both sides must use the same number.
pub const QUEUE_PAIRS: usize = 2;
/// Maximum number of queue pairs in a message.
const MAX_QUEUE_PAIRS: usize = 64;
/// Queue pair numbers have 24 bits.
const HIGHEST_NUMBER: u32 = (1 << 24) - 1;

/// Path of a device, written `host:port@mlx5_0`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NicPath {
    /// Name of the node, a `host:port`.
    pub node: String,
    /// Name of the device on that node.
    pub device: String,
}

impl NicPath {
    /// Parses a path; `None` if node or device is empty.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (node, device) = text.rsplit_once('@')?;
        let is_valid = !node.is_empty() && !device.is_empty();
        is_valid.then(|| Self { node: node.to_owned(), device: device.to_owned() })
    }
}

impl std::fmt::Display for NicPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.node, self.device)
    }
}

/// The handshake message of one side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HandshakeMessage {
    /// Path of the sender's device.
    pub local_nic_path: String,
    /// LID of the sender's port. Releases that omit it have it in their descriptor.
    pub local_lid: u16,
    /// GID of the sender's port; may be omitted like `local_lid`.
    pub local_gid: String,
    /// Path of the receiver's device.
    pub peer_nic_path: String,
    /// Numbers of the queue pairs, in connection order.
    pub qp_num: Vec<u32>,
    /// Why the connection was rejected; empty on success.
    pub reply_msg: String,
}

/// Address of the peer's queue pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteQueuePairs {
    /// Local identifier (LID) of the port.
    pub lid: u16,
    /// Global identifier (GID) of the port.
    pub gid: Gid,
    /// Queue pair numbers, in connection order.
    pub queue_pairs: Vec<u32>,
}

/// A message with which no connection can be set up.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeMessageError {
    /// The peer rejected the connection.
    #[error("the peer rejected the connection: {0}")]
    Refused(String),
    /// Invalid JSON, or a member of another type.
    #[error("not a valid connection message: {0}")]
    NotJson(#[source] serde_json::Error),
    /// The number of a queue pair is too large.
    #[error("not a valid connection message: queue pair number {0} exceeds 24 bits")]
    QueuePairNumber(u32),
    /// Neither the message nor the descriptor has the device's GID.
    #[error("not a valid connection message: the device has no identifier")]
    NoGid,
    #[error("not a valid connection message: {0}")]
    Gid(#[from] GidError),
    /// The message names another device.
    #[error("the message names device {found}, expected {expected}")]
    UnexpectedDevice {
        /// Path of the expected device.
        expected: String,
        /// Path of the device in the message.
        found: String,
    },
    /// The peer uses another number of queue pairs.
    #[error(
        "the peer uses {0} queue pairs per connection, this side {QUEUE_PAIRS}; set MC_NUM_QP_PER_EP to the same value"
    )]
    Count(usize),
}

impl HandshakeMessage {
    /// Parses a message of a peer.
    ///
    /// # Errors
    /// [`HandshakeMessageError::NotJson`] or [`HandshakeMessageError::Count`].
    pub fn read(json: &[u8]) -> Result<Self, HandshakeMessageError> {
        let message: Self = serde_json::from_slice(json).map_err(HandshakeMessageError::NotJson)?;
        if message.qp_num.len() > MAX_QUEUE_PAIRS {
            return Err(HandshakeMessageError::Count(message.qp_num.len()));
        }
        Ok(message)
    }

    /// Serialises the message as JSON.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Builds the rejection of a request.
    #[must_use]
    pub fn refusal(request: &Self, reason: String) -> Self {
        Self {
            local_nic_path: request.peer_nic_path.clone(),
            peer_nic_path: request.local_nic_path.clone(),
            reply_msg: reason,
            ..Self::default()
        }
    }

    /// Checks that this message is a successful response to `request`.
    ///
    /// # Errors
    /// [`HandshakeMessageError::Refused`] or [`HandshakeMessageError::UnexpectedDevice`].
    pub fn check_response(&self, request: &Self) -> Result<(), HandshakeMessageError> {
        if !self.reply_msg.is_empty() {
            return Err(HandshakeMessageError::Refused(self.reply_msg.clone()));
        }
        for (found, expected) in
            [(&self.local_nic_path, &request.peer_nic_path), (&self.peer_nic_path, &request.local_nic_path)]
        {
            if found != expected {
                return Err(HandshakeMessageError::UnexpectedDevice {
                    expected: expected.clone(),
                    found: found.clone(),
                });
            }
        }
        Ok(())
    }

    /// Address of the sender's queue pairs. `described` is the device's entry in the sender's descriptor, for releases that omit LID and
    /// GID in the message.
    ///
    /// # Errors
    /// When the message lacks a usable number of queue pairs, or the GID.
    pub fn remote(
        &self,
        described: Option<&moongate_transfer::DeviceDescriptor>,
    ) -> Result<RemoteQueuePairs, HandshakeMessageError> {
        if self.qp_num.len() != QUEUE_PAIRS {
            return Err(HandshakeMessageError::Count(self.qp_num.len()));
        }
        if let Some(wrong) = self.qp_num.iter().find(|number| **number > HIGHEST_NUMBER) {
            return Err(HandshakeMessageError::QueuePairNumber(*wrong));
        }
        let (lid, gid) = match described {
            _ if !self.local_gid.is_empty() => (self.local_lid, self.local_gid.as_str()),
            Some(device) => (device.lid, device.gid.as_str()),
            None => return Err(HandshakeMessageError::NoGid),
        };
        Ok(RemoteQueuePairs { lid, gid: gid.parse()?, queue_pairs: self.qp_num.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GID: &str = "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01";

    fn request() -> HandshakeMessage {
        HandshakeMessage {
            local_nic_path: "a:1@rxe0".to_owned(),
            peer_nic_path: "b:2@rxe0".to_owned(),
            local_gid: GID.to_owned(),
            qp_num: vec![17, 18],
            ..HandshakeMessage::default()
        }
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let message = request();
        assert_eq!(HandshakeMessage::read(&message.write()).unwrap(), message);
        // Newer releases send more members, older ones fewer.
        let new = br#"{"local_nic_path":"a@b","ready_ack":true,"qp_num":[1,2],"reply_msg":""}"#;
        assert_eq!(HandshakeMessage::read(new).unwrap().qp_num, [1, 2]);
        for wrong in [&b"{"[..], b"1", br#"{"qp_num":[-1]}"#, br#"{"qp_num":[4294967296]}"#] {
            assert!(matches!(HandshakeMessage::read(wrong), Err(HandshakeMessageError::NotJson(_))));
        }
        let many = format!(r#"{{"qp_num":{:?}}}"#, vec![1; 1000]);
        assert!(matches!(HandshakeMessage::read(many.as_bytes()), Err(HandshakeMessageError::Count(1000))));
    }

    #[test]
    fn queue_pair_address_is_in_message_or_descriptor() {
        let gid: Gid = GID.parse().unwrap();
        let remote = RemoteQueuePairs { lid: 0, gid, queue_pairs: vec![17, 18] };
        assert_eq!(request().remote(None).unwrap(), remote);
        let old = HandshakeMessage { local_gid: String::new(), ..request() };
        let device =
            moongate_transfer::DeviceDescriptor { name: "rxe0".to_owned(), lid: 7, gid: GID.to_owned() };
        assert_eq!(old.remote(Some(&device)).unwrap(), RemoteQueuePairs { lid: 7, ..remote });
        assert!(matches!(old.remote(None), Err(HandshakeMessageError::NoGid)));
        let one = HandshakeMessage { qp_num: vec![1], ..request() }.remote(None);
        assert!(matches!(one, Err(HandshakeMessageError::Count(1))));
        let large = HandshakeMessage { qp_num: vec![1, 1 << 24], ..request() }.remote(None);
        assert!(matches!(large, Err(HandshakeMessageError::QueuePairNumber(_))));
    }

    #[test]
    fn responses_that_do_not_match_are_rejected() {
        let request = request();
        let response = HandshakeMessage {
            local_nic_path: request.peer_nic_path.clone(),
            peer_nic_path: request.local_nic_path.clone(),
            ..HandshakeMessage::default()
        };
        assert!(response.check_response(&request).is_ok());
        let refusal = HandshakeMessage::refusal(&request, "no".to_owned()).check_response(&request);
        assert!(matches!(refusal, Err(HandshakeMessageError::Refused(reason)) if reason == "no"));
        assert!(matches!(
            request.check_response(&request),
            Err(HandshakeMessageError::UnexpectedDevice { .. })
        ));
    }

    #[test]
    fn devices_are_named_with_their_node() {
        let path = NicPath::parse("[fd00::1]:12345@mlx5_0").unwrap();
        assert_eq!((path.node.as_str(), path.device.as_str()), ("[fd00::1]:12345", "mlx5_0"));
        assert_eq!(path.to_string(), "[fd00::1]:12345@mlx5_0");
        assert!(["", "a", "@a", "a@"].into_iter().all(|text| NicPath::parse(text).is_none()));
    }
}
