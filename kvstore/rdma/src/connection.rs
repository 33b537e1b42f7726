//! The words by which two sides connect their queue pairs: handshakes of kind 0, as JSON.

use serde::{Deserialize, Serialize};

use crate::gid::Gid;

/// Queue pairs of a connection: Mooncake's default. Both sides must have as many.
pub const QUEUE_PAIRS: usize = 2;
/// Queue pairs in a message at most.
const MAX_QUEUE_PAIRS: usize = 64;
/// Queue pairs are numbered with 24 bits.
const HIGHEST_NUMBER: u32 = (1 << 24) - 1;

/// A device of a node, written `host:port@mlx5_0`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NicPath {
    /// The node's name.
    pub node: String,
    /// Its device.
    pub device: String,
}

impl NicPath {
    /// Reads a path.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (node, device) = text.rsplit_once('@')?;
        let fine = !node.is_empty() && !device.is_empty();
        fine.then(|| Self { node: node.to_owned(), device: device.to_owned() })
    }
}

impl std::fmt::Display for NicPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.node, self.device)
    }
}

/// What one side tells the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HandshakeMessage {
    /// The device of whoever writes.
    pub local_nic_path: String,
    /// Its local identifier. Releases that do not tell have it in their descriptor.
    pub local_lid: u16,
    /// Its global identifier; likewise.
    pub local_gid: String,
    /// The device of whoever reads.
    pub peer_nic_path: String,
    /// Numbers of the queue pairs, in the order in which they are connected.
    pub qp_num: Vec<u32>,
    /// Why there is no connection; empty if there is one.
    pub reply_msg: String,
}

/// Where queue pairs are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteQueuePairs {
    /// Local identifier of the port.
    pub lid: u16,
    /// Global identifier of the port.
    pub gid: Gid,
    /// Numbers of the queue pairs.
    pub queue_pairs: Vec<u32>,
}

/// A message that connects nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeMessageError {
    /// The peer does not want to.
    #[error("the peer refuses: {0}")]
    Refused(String),
    /// No JSON, or without what is needed.
    #[error("this is no message about a connection: {0}")]
    Malformed(String),
    /// Not the device that was meant.
    #[error("the message is about {found}, expected was {expected}")]
    UnexpectedDevice {
        /// The device that was meant.
        expected: String,
        /// The device of the message.
        found: String,
    },
    /// Another number of queue pairs.
    #[error(
        "the peer has {0} queue pairs for a connection, this side has {QUEUE_PAIRS}; MC_NUM_QP_PER_EP must be the same"
    )]
    Count(usize),
}

impl HandshakeMessage {
    /// Reads what a peer has sent.
    ///
    /// # Errors
    /// [`HandshakeMessageError::Malformed`].
    pub fn read(json: &[u8]) -> Result<Self, HandshakeMessageError> {
        let message: Self = serde_json::from_slice(json)
            .map_err(|error| HandshakeMessageError::Malformed(error.to_string()))?;
        if message.qp_num.len() > MAX_QUEUE_PAIRS {
            return Err(HandshakeMessageError::Count(message.qp_num.len()));
        }
        Ok(message)
    }

    /// The message as JSON.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The refusal of a question.
    #[must_use]
    pub fn refusal(question: &Self, reason: String) -> Self {
        Self {
            local_nic_path: question.peer_nic_path.clone(),
            peer_nic_path: question.local_nic_path.clone(),
            reply_msg: reason,
            ..Self::default()
        }
    }

    /// Whether it is the answer to `question`.
    ///
    /// # Errors
    /// [`HandshakeMessageError::Refused`] or [`HandshakeMessageError::UnexpectedDevice`].
    pub fn answers(&self, question: &Self) -> Result<(), HandshakeMessageError> {
        if !self.reply_msg.is_empty() {
            return Err(HandshakeMessageError::Refused(self.reply_msg.clone()));
        }
        for (found, expected) in
            [(&self.local_nic_path, &question.peer_nic_path), (&self.peer_nic_path, &question.local_nic_path)]
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

    /// Where the queue pairs of whoever wrote it are. `described` is its device's entry in its descriptor, for
    /// releases that do not tell in the message.
    ///
    /// # Errors
    /// [`HandshakeMessageError::Malformed`] or [`HandshakeMessageError::Count`].
    pub fn remote(
        &self,
        described: Option<&moongate_transfer::DeviceDescriptor>,
    ) -> Result<RemoteQueuePairs, HandshakeMessageError> {
        if self.qp_num.len() != QUEUE_PAIRS {
            return Err(HandshakeMessageError::Count(self.qp_num.len()));
        }
        if let Some(wrong) = self.qp_num.iter().find(|number| **number > HIGHEST_NUMBER) {
            return Err(HandshakeMessageError::Malformed(format!("there is no queue pair {wrong}")));
        }
        let (lid, gid) = match described {
            _ if !self.local_gid.is_empty() => (self.local_lid, self.local_gid.as_str()),
            Some(device) => (device.lid, device.gid.as_str()),
            None => return Err(HandshakeMessageError::Malformed("the device has no identifier".to_owned())),
        };
        let gid = gid
            .parse()
            .map_err(|error: crate::gid::GidError| HandshakeMessageError::Malformed(error.to_string()))?;
        Ok(RemoteQueuePairs { lid, gid, queue_pairs: self.qp_num.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GID: &str = "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01";

    fn question() -> HandshakeMessage {
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
        let message = question();
        assert_eq!(HandshakeMessage::read(&message.write()), Ok(message));
        // Newer releases say more, older ones less.
        let new = br#"{"local_nic_path":"a@b","ready_ack":true,"qp_num":[1,2],"reply_msg":""}"#;
        assert_eq!(HandshakeMessage::read(new).unwrap().qp_num, [1, 2]);
        for wrong in [&b"{"[..], b"1", br#"{"qp_num":[-1]}"#, br#"{"qp_num":[4294967296]}"#] {
            assert!(matches!(HandshakeMessage::read(wrong), Err(HandshakeMessageError::Malformed(_))));
        }
        let many = format!(r#"{{"qp_num":{:?}}}"#, vec![1; 1000]);
        assert_eq!(HandshakeMessage::read(many.as_bytes()), Err(HandshakeMessageError::Count(1000)));
    }

    #[test]
    fn queue_pair_address_is_in_message_or_descriptor() {
        let gid: Gid = GID.parse().unwrap();
        let remote = RemoteQueuePairs { lid: 0, gid, queue_pairs: vec![17, 18] };
        assert_eq!(question().remote(None), Ok(remote.clone()));
        let old = HandshakeMessage { local_gid: String::new(), ..question() };
        let device =
            moongate_transfer::DeviceDescriptor { name: "rxe0".to_owned(), lid: 7, gid: GID.to_owned() };
        assert_eq!(old.remote(Some(&device)), Ok(RemoteQueuePairs { lid: 7, ..remote }));
        assert!(old.remote(None).is_err());
        assert_eq!(
            HandshakeMessage { qp_num: vec![1], ..question() }.remote(None),
            Err(HandshakeMessageError::Count(1))
        );
        assert!(HandshakeMessage { qp_num: vec![1, 1 << 24], ..question() }.remote(None).is_err());
    }

    #[test]
    fn answers_of_others_are_refused() {
        let question = question();
        let answer = HandshakeMessage {
            local_nic_path: question.peer_nic_path.clone(),
            peer_nic_path: question.local_nic_path.clone(),
            ..HandshakeMessage::default()
        };
        assert_eq!(answer.answers(&question), Ok(()));
        let refusal = HandshakeMessage::refusal(&question, "no".to_owned());
        assert_eq!(refusal.answers(&question), Err(HandshakeMessageError::Refused("no".to_owned())));
        assert!(matches!(question.answers(&question), Err(HandshakeMessageError::UnexpectedDevice { .. })));
    }

    #[test]
    fn devices_are_named_with_their_node() {
        let path = NicPath::parse("[fd00::1]:12345@mlx5_0").unwrap();
        assert_eq!((path.node.as_str(), path.device.as_str()), ("[fd00::1]:12345", "mlx5_0"));
        assert_eq!(path.to_string(), "[fd00::1]:12345@mlx5_0");
        assert!(["", "a", "@a", "a@"].into_iter().all(|text| NicPath::parse(text).is_none()));
    }
}
