//! ZeroMQ's wire protocol over TCP: ZMTP 3.0 and 3.1 with the NULL mechanism ([RFC 23], [RFC 37]).
//!
//! Engines publish KV-cache events on PUB sockets and replay missed ones on ROUTER sockets. [`codec`] is the protocol without I/O;
//! around it are the four roles that this takes:
//!
//! | type | ZeroMQ's name | role |
//! |---|---|---|
//! | [`ZmtpSubscriber`] | SUB, connecting or bound | receives events, and is told when a peer comes and goes |
//! | [`ZmtpPublisher`] | PUB, bound | sends events; a slow subscriber loses messages, which are counted |
//! | [`ZmtpReplies`] | DEALER, connecting | asks for a replay |
//! | [`ZmtpResponder`] | ROUTER, bound | answers such requests |
//!
//! Nothing here starts a task: each socket works while its caller polls it, and dropping it closes its connections.
//! There is neither encryption nor authentication, as in the NULL mechanism: use it inside a trusted network.
//!
//! [RFC 23]: https://rfc.zeromq.org/spec/23/
//! [RFC 37]: https://rfc.zeromq.org/spec/37/

mod accept;
mod backoff;
pub mod codec;
mod connection;
mod endpoint;
mod error;
mod options;
mod publisher;
mod request;
mod responder;
mod subscriber;

pub use codec::ZmtpMessage;
pub use endpoint::{ZmtpEndpoint, ZmtpEndpointError};
pub use error::ZmtpError;
pub use options::{ReconnectPolicy, TcpKeepaliveOptions, ZmtpOptions};
pub use publisher::{ZmtpPublisher, ZmtpPublisherServer, ZmtpPublisherStats};
pub use request::{ZmtpReplies, request};
pub use responder::ZmtpResponder;
pub use subscriber::{PublisherPeer, SubscriberEvent, ZmtpSubscriber};
