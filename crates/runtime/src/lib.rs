//! Shared by all long-running commands: supervised tasks, signals, drain, listeners, TLS, configuration, secrets, busy polling, backoff,
//! metrics.

pub mod busy_poll;
mod client_tls;
pub mod config;
mod dedicated_thread;
mod file_changes;
mod freed_memory;
pub mod listener;
mod log_output;
mod log_rate_limit;
mod memory_limit;
pub mod metrics;
pub mod net;
mod open_files;
mod peer_tls;
mod secret;
pub mod signals;
pub mod supervisor;

pub use client_tls::{ClientTls, ClientTlsFiles, EngineTlsArgs, plain_http_client, tls_error_hint};
pub use config::{ConfigEntryError, ConfigError, EffectiveSetting, SettingOrigin, effective_settings, parse};
pub use dedicated_thread::DedicatedThread;
pub use file_changes::FileChangeWatcher;
pub use freed_memory::return_freed_memory;
pub use listener::{
    BindError, ClientCertificate, ConnectionRejection, ListenerHandle, ListenerLimits, ListenerSocket,
    PeerAddr, ServerTls, ServerTlsFiles, TlsConfigError, bind, serve,
};
pub use log_output::{StderrLogOutput, log_lines_dropped};
pub use log_rate_limit::LogRateLimiter;
pub use memory_limit::memory_limit;
pub use moongate_backoff::{Backoff, BackoffPolicy};
pub use open_files::{DescriptorShares, open_file_limit, raise_open_file_limit};
pub use peer_tls::{
    BlockingTlsStream, CertificateFingerprint, PeerTls, PeerTlsArgs, PeerTlsFiles, TLS_REQUIRED,
    describe_tls_error, is_tls_alert, random_key,
};
pub use secret::{EmptySecretError, SecretString};
pub use signals::terminated;
pub use supervisor::{ShutdownTimeoutError, Supervisor, task_panics};
