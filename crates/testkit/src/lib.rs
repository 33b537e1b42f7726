//! For tests only: real programs that several crates are tested with.

mod control_plane;

pub use control_plane::{ControlPlane, ControlPlaneError, Namespace};
