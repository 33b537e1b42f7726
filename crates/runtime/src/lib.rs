//! What every long-running command shares: supervised tasks, signals, drain, listeners, configuration.

pub mod config;
pub mod listener;
pub mod signals;
pub mod supervisor;

pub use config::{ConfigError, Origin, Setting, effective, parse};
pub use listener::{BindError, ListenerLimits, PeerAddr, Serving, bind, serve};
pub use signals::terminated;
pub use supervisor::{StillRunning, Supervisor};
