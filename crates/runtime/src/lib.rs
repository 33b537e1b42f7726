//! What every long-running command shares: supervised tasks, signals, drain, listeners, TLS, configuration, secrets,
//! staying awake.

pub mod awake;
pub mod config;
mod file_changes;
pub mod listener;
mod secret;
pub mod signals;
pub mod supervisor;
mod trust;

pub use config::{ConfigError, Origin, Setting, effective, parse};
pub use file_changes::FileChanges;
pub use listener::{
    BindError, ClientCertificate, ListenerLimits, PeerAddr, Serving, Socket, Tls, TlsError, TlsFiles, bind,
    serve,
};
pub use secret::{EmptySecret, Secret};
pub use signals::terminated;
pub use supervisor::{StillRunning, Supervisor};
pub use trust::{EngineTlsOptions, Trust, TrustFiles, plain_http, tls_remedy};
