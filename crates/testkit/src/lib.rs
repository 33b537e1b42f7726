//! Test support: what the tests of several crates need besides the code under test.

#[cfg(feature = "kubernetes")]
mod audit;
mod certificates;
#[cfg(feature = "collector")]
pub mod collector;
#[cfg(feature = "kubernetes")]
mod control_plane;
#[cfg(feature = "kubernetes")]
mod kubelet;
mod ports;
#[cfg(feature = "s3")]
mod s3;

#[cfg(feature = "kubernetes")]
pub use audit::{AuditEvent, AuditObjectRef, AuditResponseStatus, AuditUser};
pub use certificates::{CertificateError, IdentityFiles, PemIdentity, TestAuthority};
#[cfg(feature = "kubernetes")]
pub use control_plane::{ControlPlane, ControlPlaneError, TestNamespace};
#[cfg(feature = "kubernetes")]
pub use kubelet::{ContainerHealth, FakeKubelet, KubeletTimings, NoopRuntime, PodRuntime, pod_address};
pub use ports::free_port;
#[cfg(feature = "s3")]
pub use s3::{S3Server, S3ServerError};
