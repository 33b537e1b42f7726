//! ZeroMQ's wire protocol over TCP: ZMTP 3.0 and 3.1 with the NULL mechanism ([RFC 23], [RFC 37]).
//!
//! Engines publish KV-cache events on PUB sockets and replay missed ones on ROUTER sockets. [`codec`] is the protocol without I/O; the
//! sockets implement the four roles:
//!
//! | type | ZeroMQ's name | role |
//! |---|---|---|
//! | [`ZmtpSubscriber`] | SUB, connecting or bound | receives messages, and events when peers connect and disconnect |
//! | [`ZmtpPublisher`] | PUB, bound | sends messages; those dropped for slow subscribers are counted |
//! | [`ZmtpReplies`] | DEALER, connecting | sends a request and reads its replies |
//! | [`ZmtpResponder`] | ROUTER, bound | responds to requests |
//!
//! No socket starts a task: each makes progress while its caller polls it, and dropping it closes its connections. The NULL mechanism has
//! neither encryption nor authentication: use it in trusted networks only.
//!
//! [RFC 23]: https://rfc.zeromq.org/spec/23/
//! [RFC 37]: https://rfc.zeromq.org/spec/37/

mod accept;
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
pub use options::{TcpKeepaliveOptions, ZmtpOptions};
pub use publisher::{ZmtpPublisher, ZmtpPublisherServer, ZmtpPublisherStats};
pub use request::{ZmtpReplies, request};
pub use responder::ZmtpResponder;
pub use subscriber::{PublisherPeer, SubscriberEvent, ZmtpSubscriber};
