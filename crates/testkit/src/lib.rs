//! For tests only: real programs that several crates are tested with.

mod audit;
mod control_plane;
mod kubelet;

pub use audit::{Answer, Asked, Object, User};
pub use control_plane::{ControlPlane, ControlPlaneError, Namespace};
pub use kubelet::{Empty, Kubelet, Pace, Runtime, State, address};
