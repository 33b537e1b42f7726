//! Calls of the hooks that pods serve for updates in place and removals, and their responses.

use k8s_openapi::jiff::Timestamp;

/// Hook that a pod serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpgradeHook {
    /// Finish running requests and save state: the pod will be restarted.
    Drain,
    /// As [`Self::Drain`], but the pod will be deleted: what it stores has to be moved elsewhere.
    DrainForRemoval,
    /// Whether the pod has restored its state after the restart.
    Settled,
    /// How much is lost, or has to be moved, if the pod is removed.
    RemovalCost,
}

/// A hook call to a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HookCall {
    pub pod: String,
    /// IP address of the pod.
    pub ip: String,
    /// Port of the hook server.
    pub port: u16,
    pub hook: UpgradeHook,
    /// Since when the update or removal waits for the pod. A response is valid for this one only.
    pub since: Timestamp,
}

/// Response of a pod's hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookResult {
    /// Finished, with an optional warning.
    Done(Option<String>),
    /// Not finished, with an optional reason.
    Pending(Option<String>),
    /// Of [`UpgradeHook::RemovalCost`]. Only costs of pods of one role can be compared.
    Cost(i32),
}
