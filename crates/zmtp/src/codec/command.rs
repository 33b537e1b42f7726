//! Commands: READY and ERROR of the handshake, and subscriptions and heartbeats of ZMTP 3.1.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{COMMAND, ZmtpProtocolError, put_frame_header};

/// Maximum length of a PING context in the protocol.
const CONTEXT_BYTES: usize = 16;

/// A command, sent or received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZmtpCommand {
    /// Completes one side's handshake.
    Ready(ReadyCommand),
    /// Rejects the connection with this reason.
    Error(String),
    /// Subscribes to messages whose first part has this prefix.
    Subscribe(Bytes),
    /// Cancels one subscription with this prefix.
    Cancel(Bytes),
    /// Requests a PONG from the peer.
    Ping {
        /// Time without traffic after which the sender may close the connection, in tenths of a second. 0: never.
        ttl: u16,
        /// Returned in the PONG. At most 16 bytes.
        context: Bytes,
    },
    /// Response to a PING, with its context.
    Pong(Bytes),
    /// A command outside ZMTP 3.1, which must be ignored.
    Unknown,
}

/// Content of a READY command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyCommand {
    /// Socket type of the sender.
    pub socket_type: ZmtpSocketType,
}

/// Socket types of ZeroMQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "these are ZeroMQ's names")]
pub enum ZmtpSocketType {
    Pair,
    Pub,
    Sub,
    XPub,
    XSub,
    Req,
    Rep,
    Dealer,
    Router,
    Push,
    Pull,
}

const SOCKET_TYPES: &[(ZmtpSocketType, &str)] = &[
    (ZmtpSocketType::Pair, "PAIR"),
    (ZmtpSocketType::Pub, "PUB"),
    (ZmtpSocketType::Sub, "SUB"),
    (ZmtpSocketType::XPub, "XPUB"),
    (ZmtpSocketType::XSub, "XSUB"),
    (ZmtpSocketType::Req, "REQ"),
    (ZmtpSocketType::Rep, "REP"),
    (ZmtpSocketType::Dealer, "DEALER"),
    (ZmtpSocketType::Router, "ROUTER"),
    (ZmtpSocketType::Push, "PUSH"),
    (ZmtpSocketType::Pull, "PULL"),
];

impl ZmtpSocketType {
    /// The type's name in a READY command.
    pub fn name(self) -> &'static str {
        SOCKET_TYPES.iter().find(|(socket_type, _)| *socket_type == self).map_or("", |(_, name)| name)
    }

    /// Whether a socket of this type may connect to one of the other type.
    pub fn is_compatible_with(self, other: Self) -> bool {
        use ZmtpSocketType as S;
        match self {
            S::Pair => other == S::Pair,
            S::Pub | S::XPub => matches!(other, S::Sub | S::XSub),
            S::Sub | S::XSub => matches!(other, S::Pub | S::XPub),
            S::Req => matches!(other, S::Rep | S::Router),
            S::Rep => matches!(other, S::Req | S::Dealer),
            S::Dealer => matches!(other, S::Rep | S::Dealer | S::Router),
            S::Router => matches!(other, S::Req | S::Dealer | S::Router),
            S::Push => other == S::Pull,
            S::Pull => other == S::Push,
        }
    }
}

impl ZmtpCommand {
    /// Appends the encoded command frame.
    pub fn encode(&self, out: &mut BytesMut) {
        let mut body = BytesMut::new();
        match self {
            Self::Ready(ready) => {
                put_name(b"READY", &mut body);
                let value = ready.socket_type.name();
                put_name(SOCKET_TYPE, &mut body);
                body.put_u32(value.len() as u32);
                body.put_slice(value.as_bytes());
            }
            Self::Error(reason) => {
                put_name(b"ERROR", &mut body);
                let reason = &reason.as_bytes()[..reason.len().min(u8::MAX.into())];
                put_name(reason, &mut body);
            }
            Self::Subscribe(topic) => {
                put_name(b"SUBSCRIBE", &mut body);
                body.put_slice(topic);
            }
            Self::Cancel(topic) => {
                put_name(b"CANCEL", &mut body);
                body.put_slice(topic);
            }
            Self::Ping { ttl, context } => {
                put_name(b"PING", &mut body);
                body.put_u16(*ttl);
                body.put_slice(context);
            }
            Self::Pong(context) => {
                put_name(b"PONG", &mut body);
                body.put_slice(context);
            }
            Self::Unknown => put_name(b"", &mut body),
        }
        put_frame_header(COMMAND, body.len(), out);
        out.put_slice(&body);
    }

    /// Parses the body of a command frame.
    ///
    /// # Errors
    /// [`ZmtpProtocolError::Command`] or [`ZmtpProtocolError::SocketType`].
    pub fn decode(mut body: Bytes) -> Result<Self, ZmtpProtocolError> {
        let name = take_short_string(&mut body).ok_or(ZmtpProtocolError::Command("without a name"))?;
        Ok(match &name[..] {
            b"READY" => Self::Ready(ReadyCommand::decode(body)?),
            b"ERROR" => {
                let reason = take_short_string(&mut body).ok_or(ZmtpProtocolError::Command("ERROR"))?;
                Self::Error(String::from_utf8_lossy(&reason).into_owned())
            }
            b"SUBSCRIBE" => Self::Subscribe(body),
            b"CANCEL" => Self::Cancel(body),
            b"PING" => {
                let ttl = body.try_get_u16().map_err(|_| ZmtpProtocolError::Command("PING"))?;
                if body.len() > CONTEXT_BYTES {
                    return Err(ZmtpProtocolError::Command("PING"));
                }
                Self::Ping { ttl, context: body }
            }
            b"PONG" => Self::Pong(body),
            _ => Self::Unknown,
        })
    }
}

const SOCKET_TYPE: &[u8] = b"Socket-Type";

impl ReadyCommand {
    fn decode(mut metadata: Bytes) -> Result<Self, ZmtpProtocolError> {
        let malformed = ZmtpProtocolError::Command("READY");
        let mut socket_type = None;
        while metadata.has_remaining() {
            let (Some(name), Ok(length)) = (take_short_string(&mut metadata), metadata.try_get_u32()) else {
                return Err(malformed);
            };
            let value = take_bytes(&mut metadata, length as usize).ok_or_else(|| malformed.clone())?;
            // Property names are case-insensitive; values of this property are case-sensitive.
            if name.eq_ignore_ascii_case(SOCKET_TYPE) {
                socket_type = SOCKET_TYPES.iter().find(|(_, name)| name.as_bytes() == value);
            }
        }
        match socket_type {
            Some(&(socket_type, _)) => Ok(Self { socket_type }),
            None => Err(ZmtpProtocolError::SocketType),
        }
    }
}

fn put_name(name: &[u8], out: &mut BytesMut) {
    out.put_u8(name.len() as u8);
    out.put_slice(name);
}

/// Takes a string with a one-byte length prefix.
fn take_short_string(from: &mut Bytes) -> Option<Bytes> {
    let length = from.try_get_u8().ok()?;
    take_bytes(from, length.into())
}

fn take_bytes(from: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= from.len()).then(|| from.split_to(length))
}
