//! Mooncake's bytes: what is on the wire, without sockets.

pub mod events;
