//! ZeroMQ's wire protocol over TCP: ZMTP 3.0 and 3.1 with the NULL mechanism ([RFC 23], [RFC 37]).
//!
//! Engines publish KV-cache events on PUB sockets and replay missed ones on ROUTER sockets. [`codec`] is the protocol without I/O;
//! around it are the four roles that this takes:
//!
//! | type | ZeroMQ's name | role |
//! |---|---|---|
//! | [`Subscriber`] | SUB, connecting or bound | receives events, and is told when a peer comes and goes |
//! | [`Publisher`] | PUB, bound | sends events; a slow subscriber loses messages, which are counted |
//! | [`Replies`] | DEALER, connecting | asks for a replay |
//! | [`Responder`] | ROUTER, bound | answers such requests |
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

pub use codec::Message;
pub use endpoint::{Endpoint, EndpointError};
pub use error::Error;
pub use options::{Options, Retry, TcpOptions};
pub use publisher::{Publisher, PublisherServer, PublisherStats};
pub use request::{Replies, request};
pub use responder::Responder;
pub use subscriber::{Event, Peer, Subscriber};
