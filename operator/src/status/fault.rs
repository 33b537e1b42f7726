//! Condition `FaultRecovery` of groups and instances: whether they recover from a fault. Absent until it is first needed.

pub(crate) const FAULT_RECOVERY: &str = "FaultRecovery";

/// Condition reason while instances of a group recover from a fault.
pub(crate) const INSTANCE_FAULT: &str = "InstanceFault";
/// Condition reason after a fault that a rule only reports, since it has acted on too many.
pub(crate) const FAULT_BUDGET_EXHAUSTED: &str = "FaultBudgetExhausted";
/// Condition reason for a policy whose fault recovery is invalid, and therefore off.
pub(crate) const INVALID_POLICY: &str = "InvalidPolicy";
