//! From a request to the scheduler's decision: the request waits in the admission queue until the scheduler has chosen a route among
//! the engines that are eligible for it.

mod admission_queue;
mod admission_state;
mod clock;
mod eligibility;
mod fallback;
mod in_flight;
mod shared_queue;
mod unscheduled;

pub(crate) use admission_queue::{AdmissionOptions, AdmissionQueue};
pub(crate) use clock::SchedulerClock;
pub(crate) use eligibility::ChosenRoute;
pub(crate) use fallback::fallback_workers;
pub(crate) use in_flight::InFlightGuard;
pub(crate) use shared_queue::{QueueIdentity, QueuePeers, QueueServer, run_election};
pub use shared_queue::{QueuePeerAddress, QueuePeerAddressError, QueuePeersError};
