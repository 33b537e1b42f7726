//! Test support: real programs used by the tests of several crates.

mod audit;
mod control_plane;
mod kubelet;

pub use audit::{AuditEvent, AuditObjectRef, AuditResponseStatus, AuditUser};
pub use control_plane::{ControlPlane, ControlPlaneError, TestNamespace};
pub use kubelet::{ContainerHealth, FakeKubelet, KubeletTimings, NoopRuntime, PodRuntime, pod_address};
