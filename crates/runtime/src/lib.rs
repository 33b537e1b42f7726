//! What every long-running command shares: supervised tasks, signals, drain, listeners, TLS, configuration, secrets,
//! staying awake.

pub mod awake;
pub mod config;
mod file_changes;
pub mod listener;
mod log_interval;
mod log_output;
mod memory_limit;
pub mod net;
mod open_files;
mod own_thread;
mod peer_tls;
mod process_metrics;
mod secret;
pub mod signals;
pub mod supervisor;
mod trust;

pub use config::{ConfigError, Origin, Setting, effective, parse};
pub use file_changes::FileChanges;
pub use listener::{
    BindError, ClientCertificate, ConnectionRefusal, ListenerLimits, PeerAddr, Serving, Socket, Tls,
    TlsError, TlsFiles, bind, serve,
};
pub use log_interval::LogInterval;
pub use log_output::{LogOutput, log_lines_lost};
pub use memory_limit::memory_limit;
pub use open_files::{DescriptorShares, open_file_limit, raise_open_file_limit};
pub use own_thread::OwnThread;
pub use peer_tls::{
    BlockingTlsStream, Fingerprint, PeerTls, PeerTlsFiles, PeerTlsOptions, TLS_REQUIRED, explain_tls,
    is_tls_alert, random_key,
};
pub use process_metrics::append_process_metrics;
pub use secret::{EmptySecret, Secret};
pub use signals::terminated;
pub use supervisor::{StillRunning, Supervisor, task_panics};
pub use trust::{EngineTlsOptions, Trust, TrustFiles, plain_http, tls_remedy};
