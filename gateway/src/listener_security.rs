//! Security of the two listeners and of engine connections: TLS, keys and tokens, and a summary of what is exposed.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use moongate_runtime::{ClientTls, FileChangeWatcher, ServerTls, ServerTlsFiles, Supervisor, TlsConfigError};

use crate::access::{AccessControl, AccessFileError};
use crate::config::GatewayOptions;

/// Security settings of a listener are invalid.
#[derive(Debug, thiserror::Error)]
pub enum ListenerSecurityError {
    /// An access file or JWKS file cannot be used.
    #[error(transparent)]
    Access(#[from] AccessFileError),
    /// TLS settings or files that cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsConfigError),
    /// The engines' API key is not a valid header value.
    #[error("--engine-api-key has characters that are invalid in a header; use visible ASCII")]
    EngineKey,
}

/// Access control and TLS of both listeners, and TLS of connections to engines.
pub(crate) struct ListenerSecurity {
    pub(crate) access: Arc<AccessControl>,
    pub(crate) tls: Option<ServerTls>,
    pub(crate) admin_tls: Option<ServerTls>,
    /// Trusted CAs of engine connections.
    pub(crate) engine_trust: ClientTls,
    changes: FileChangeWatcher,
}

impl ListenerSecurity {
    pub(crate) fn load(options: &GatewayOptions) -> Result<Self, ListenerSecurityError> {
        if options.engines.engine_api_key.is_some() && options.engines.authorization().is_none() {
            return Err(ListenerSecurityError::EngineKey);
        }
        let listeners = &options.listeners;
        let files = [
            ("--tls-cert", listeners.tls_cert.as_ref()),
            ("--tls-key", listeners.tls_key.as_ref()),
            ("--tls-client-ca", listeners.tls_client_ca.as_ref()),
        ];
        let admin_files = [
            ("--admin-tls-cert", listeners.admin_tls_cert.as_ref()),
            ("--admin-tls-key", listeners.admin_tls_key.as_ref()),
            ("--admin-tls-client-ca", listeners.admin_tls_client_ca.as_ref()),
        ];
        let load = |given: Option<ServerTlsFiles>, files| {
            given.map(ServerTls::load).transpose().map_err(|error| error.with_flag(files))
        };
        let changes = FileChangeWatcher::new(options.access.files());
        let admin_certificates = options.listeners.admin_tls_client_ca.is_some();
        Ok(Self {
            access: Arc::new(AccessControl::load(&options.access, admin_certificates)?),
            tls: load(options.listeners.tls()?, &files)?,
            admin_tls: load(options.listeners.admin_tls()?, &admin_files)?,
            engine_trust: options.engines.engine_tls.trust()?,
            changes,
        })
    }

    /// Starts the tasks that reload files, and returns the access control and the TLS of the two listeners.
    pub(crate) fn start_reloading(
        self,
        supervisor: &Supervisor,
    ) -> (Arc<AccessControl>, Option<ServerTls>, Option<ServerTls>) {
        let (access, changes, stop) = (self.access.clone(), self.changes, supervisor.token());
        supervisor.spawn_restarted("access-files", move || {
            access.clone().watch_files(changes.clone(), stop.clone())
        });
        for tls in [&self.tls, &self.admin_tls].into_iter().flatten() {
            let (tls, stop) = (tls.clone(), supervisor.token());
            supervisor
                .spawn_restarted("listener-certificates", move || tls.clone().reload_on_change(stop.clone()));
        }
        let (trust, stop) = (self.engine_trust, supervisor.token());
        supervisor.spawn_restarted("engine-ca", move || trust.clone().reload_on_change(stop.clone()));
        (self.access, self.tls, self.admin_tls)
    }

    /// Summary of each listener's exposure.
    pub(crate) fn exposures(
        &self,
        options: &GatewayOptions,
        addresses: [SocketAddr; 2],
    ) -> [ListenerExposure; 2] {
        let [public, admin] = addresses;
        let certified = options.listeners.tls_client_ca.is_some();
        let open: Vec<&str> = options.ingress.admin_open.iter().filter_map(|path| path.path()).collect();
        let open_paths = match open.as_slice() {
            [] => String::new(),
            open => format!("; {} without authentication", open.join(", ")),
        };
        let admin_protected = self.access.admin_requires_authentication();
        let registration_note =
            match (options.engines.registration, options.engines.registration_token.is_some()) {
                (true, false) if !admin_protected => {
                    "; anyone who can reach it can redirect prompts (--registration)"
                }
                _ => "",
            };
        [
            ListenerExposure {
                listener: "public",
                address: public,
                authenticated: self.access.requires_authentication() || certified,
                tls: self.tls.is_some(),
                required_credentials: match (self.access.describe(), certified) {
                    (None, false) => "no client authentication".to_owned(),
                    (None, true) => "clients need a certificate".to_owned(),
                    (Some(keys), false) => format!("clients need {keys}"),
                    (Some(keys), true) => format!("clients need a certificate and {keys}"),
                },
            },
            ListenerExposure {
                listener: "admin",
                address: admin,
                authenticated: admin_protected,
                tls: self.admin_tls.is_some(),
                required_credentials: match admin_protected {
                    true => format!("requires a token, key or certificate{open_paths}"),
                    false => format!(
                        "no authentication for decisions, predictions, metrics and engines{registration_note}"
                    ),
                },
            },
        ]
    }
}

pub(crate) struct ListenerExposure {
    listener: &'static str,
    address: SocketAddr,
    authenticated: bool,
    tls: bool,
    required_credentials: String,
}

impl ListenerExposure {
    /// Reachable from a network without authentication, or with credentials sent in plain text.
    fn is_insecure(&self) -> bool {
        let is_safe = self.authenticated && self.tls;
        !(is_safe || self.address.ip().is_loopback())
    }

    /// Logs the exposure; as a warning if it is insecure.
    pub(crate) fn log(&self) {
        if self.is_insecure() {
            tracing::warn!("{self}");
        } else {
            tracing::info!("{self}");
        }
    }
}

impl fmt::Display for ListenerExposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listener, address, tls, required_credentials: credentials, .. } = self;
        let tls = if *tls { "TLS" } else { "no TLS" };
        let reach = if address.ip().is_loopback() { " (this machine only)" } else { "" };
        write!(f, "{listener} listener {address}{reach}: {tls}; {credentials}")
    }
}

/// Loads the security settings as a gateway would, and returns the exposure of each listener.
///
/// # Errors
///
/// [`ListenerSecurityError`] if a setting or file is invalid.
pub fn exposures(options: &GatewayOptions) -> Result<[String; 2], ListenerSecurityError> {
    let security = ListenerSecurity::load(options)?;
    Ok(security
        .exposures(options, [options.listen, options.admin_listen])
        .map(|exposure| exposure.to_string()))
}
