//! What guards the two listeners: TLS, keys and tokens; what is left open; and what engines are known by.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use moongate_runtime::{ClientTls, FileChangeWatcher, ServerTls, ServerTlsFiles, Supervisor, TlsConfigError};

use crate::access::{AccessControl, AccessFileError};
use crate::config::{GatewayOptions, UnauthenticatedPath};

/// A listener cannot be guarded as the settings want it.
#[derive(Debug, thiserror::Error)]
pub enum ListenerSecurityError {
    /// Who may ask cannot be told.
    #[error(transparent)]
    Access(#[from] AccessFileError),
    /// Settings or files for TLS that cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsConfigError),
    /// No header can carry the engines' key.
    #[error("--engine-api-key has characters that no header can carry; use visible ASCII")]
    EngineKey,
}

/// The guards of both listeners, and of connections to engines.
pub(crate) struct ListenerSecurity {
    pub(crate) access: Arc<AccessControl>,
    pub(crate) tls: Option<ServerTls>,
    pub(crate) admin_tls: Option<ServerTls>,
    /// What engines are known by.
    pub(crate) engine_trust: ClientTls,
    changes: FileChangeWatcher,
}

impl ListenerSecurity {
    pub(crate) fn load(options: &GatewayOptions) -> Result<Self, ListenerSecurityError> {
        if options.engines.engine_api_key.is_some() && options.engines.authorization().is_none() {
            return Err(ListenerSecurityError::EngineKey);
        }
        let of = &options.listeners;
        let files = [
            ("--tls-cert", of.tls_cert.as_ref()),
            ("--tls-key", of.tls_key.as_ref()),
            ("--tls-client-ca", of.tls_client_ca.as_ref()),
        ];
        let admin_files = [
            ("--admin-tls-cert", of.admin_tls_cert.as_ref()),
            ("--admin-tls-key", of.admin_tls_key.as_ref()),
            ("--admin-tls-client-ca", of.admin_tls_client_ca.as_ref()),
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

    /// Keeps files read, and gives back what guards the requests and the two sockets.
    pub(crate) fn start_reloading(
        self,
        supervisor: &Supervisor,
    ) -> (Arc<AccessControl>, Option<ServerTls>, Option<ServerTls>) {
        let (gate, changes, stop) = (self.access.clone(), self.changes, supervisor.token());
        supervisor
            .spawn_restarted("renew keys", move || gate.clone().watch_files(changes.clone(), stop.clone()));
        for tls in [&self.tls, &self.admin_tls].into_iter().flatten() {
            let (tls, stop) = (tls.clone(), supervisor.token());
            supervisor
                .spawn_restarted("renew certificates", move || tls.clone().reload_on_change(stop.clone()));
        }
        let (trust, stop) = (self.engine_trust, supervisor.token());
        supervisor.spawn_restarted("renew what engines are known by", move || {
            trust.clone().reload_on_change(stop.clone())
        });
        (self.access, self.tls, self.admin_tls)
    }

    /// One line for each listener.
    pub(crate) fn exposures(
        &self,
        options: &GatewayOptions,
        addresses: [SocketAddr; 2],
    ) -> [ListenerExposure; 2] {
        let [public, admin] = addresses;
        let certified = options.listeners.tls_client_ca.is_some();
        let open: Vec<&str> = options.access.admin_open.iter().filter_map(|path| path.path()).collect();
        let besides = match open.as_slice() {
            [] => String::new(),
            open => format!("; {} for everybody", open.join(", ")),
        };
        let admin_closed = self.access.admin_requires_authentication();
        let registers = match (options.engines.registration, options.engines.registration_token.is_some()) {
            (true, false) if !admin_closed => {
                "; whoever reaches it can have prompts sent anywhere (--registration)"
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
                    (None, false) => "clients need no key".to_owned(),
                    (None, true) => "clients need a certificate".to_owned(),
                    (Some(keys), false) => format!("clients need {keys}"),
                    (Some(keys), true) => format!("clients need a certificate and {keys}"),
                },
            },
            ListenerExposure {
                listener: "admin",
                address: admin,
                authenticated: admin_closed,
                tls: self.admin_tls.is_some(),
                required_credentials: match admin_closed {
                    true => format!("asks for a token, key or certificate{besides}"),
                    false => format!("decisions, predictions, metrics and engines for everybody{registers}"),
                },
            },
        ]
    }
}

/// What a listener lets in.
pub(crate) struct ListenerExposure {
    listener: &'static str,
    address: SocketAddr,
    authenticated: bool,
    tls: bool,
    required_credentials: String,
}

impl ListenerExposure {
    /// Open to a network without anybody being asked, or with keys that the network can read.
    fn is_insecure(&self) -> bool {
        let is_safe = self.authenticated && self.tls;
        !(is_safe || self.address.ip().is_loopback())
    }

    /// Into the log; as a warning where a network can come in or listen.
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
        let Self { listener, address, tls, required_credentials: asks, .. } = self;
        let tls = if *tls { "TLS" } else { "no TLS" };
        let reach = if address.ip().is_loopback() { " (this machine only)" } else { "" };
        write!(f, "{listener} listener {address}{reach}: {tls}; {asks}")
    }
}

impl UnauthenticatedPath {
    fn path(self) -> Option<&'static str> {
        match self {
            UnauthenticatedPath::Health => Some("/health"),
            UnauthenticatedPath::Ready => Some("/ready"),
            UnauthenticatedPath::Metrics => Some("/metrics"),
            UnauthenticatedPath::None => None,
        }
    }
}

/// Loads all that guards the listeners, as a gateway with these settings would, and tells what would be open.
///
/// # Errors
/// [`ListenerSecurityError`]
pub fn exposures(options: &GatewayOptions) -> Result<[String; 2], ListenerSecurityError> {
    let guards = ListenerSecurity::load(options)?;
    Ok(guards.exposures(options, [options.listen, options.admin_listen]).map(|exposure| exposure.to_string()))
}
