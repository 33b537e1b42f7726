//! One admission queue for several gateways.
//!
//! Every gateway decides alone what its scheduler knows, so several of them make decisions that conflict. With `--queue-peer`, the gateway
//! that has run longest leads: the others send it a ticket for each request (lengths, predicted hits, tenant, excluded engines) and get the
//! route. Bodies and streams stay where they are. A gateway without a connection to the leader decides alone, as without peers; then
//! nothing is lost but the common order.
//!
//! Two gateways that both believe to lead are no danger: each decides for those that follow it, and sees the other's load in the
//! engines' reports.

mod election;
mod follower;
mod lines;
mod messages;
mod peers;
mod server;

pub(crate) use election::{QueueIdentity, run_election};
pub(super) use messages::{
    EngineHits, LeaderMessage, QueueTicket, TicketMessage, TicketRejection, TicketRoute, engine_names,
    excluded_engines,
};
pub(crate) use peers::QueuePeers;
pub use peers::{QueuePeerAddress, QueuePeerAddressError, QueuePeersError};
pub(crate) use server::QueueServer;

#[cfg(test)]
mod tests;
