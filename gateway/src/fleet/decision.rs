//! A decision of the scheduler, whose instance numbers are those of one fleet.

use std::sync::Arc;

use moongate_scheduler::RoutingDecision;

use super::snapshot::FleetSnapshot;

/// A decision, with the fleet that it was made for.
#[derive(Debug, Clone)]
pub(crate) struct FleetDecision {
    pub(crate) decision: Arc<RoutingDecision>,
    pub(crate) fleet: Arc<FleetSnapshot>,
}
