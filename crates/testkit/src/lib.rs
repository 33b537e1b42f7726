//! For tests only: real programs that several crates are tested with.

mod audit;
mod control_plane;
mod kubelet;

pub use audit::{AuditEvent, AuditObjectRef, AuditResponseStatus, AuditUser};
pub use control_plane::{ControlPlane, ControlPlaneError, TestNamespace};
pub use kubelet::{ContainerHealth, FakeKubelet, KubeletTimings, NoopRuntime, PodRuntime, pod_address};
