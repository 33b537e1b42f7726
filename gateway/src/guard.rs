//! What guards the two listeners: TLS, keys and tokens; what is left open; and what engines are known by.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use moongate_runtime::{FileChanges, Supervisor, Tls, TlsError, TlsFiles, Trust};

use crate::access::{AccessError, Gate};
use crate::config::{GatewayOptions, OpenPath};

/// A listener cannot be guarded as the settings want it.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// Who may ask cannot be told.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Settings or files for TLS that cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// No header can carry the engines' key.
    #[error("--engine-api-key has characters that no header can carry; use visible ASCII")]
    EngineKey,
}

/// The guards of both listeners, and of connections to engines.
pub(crate) struct Guards {
    pub(crate) gate: Arc<Gate>,
    pub(crate) tls: Option<Tls>,
    pub(crate) admin_tls: Option<Tls>,
    /// What engines are known by.
    pub(crate) trust: Trust,
    changes: FileChanges,
}

impl Guards {
    pub(crate) fn load(options: &GatewayOptions) -> Result<Self, GuardError> {
        if options.engines.engine_api_key.is_some() && options.engines.authorization().is_none() {
            return Err(GuardError::EngineKey);
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
        let load = |given: Option<TlsFiles>, files| {
            given.map(Tls::load).transpose().map_err(|error| error.with_flag(files))
        };
        let changes = FileChanges::new(options.access.files());
        let admin_certificates = options.listeners.admin_tls_client_ca.is_some();
        Ok(Self {
            gate: Arc::new(Gate::load(&options.access, admin_certificates)?),
            tls: load(options.listeners.tls()?, &files)?,
            admin_tls: load(options.listeners.admin_tls()?, &admin_files)?,
            trust: options.engines.engine_tls.trust()?,
            changes,
        })
    }

    /// Keeps files read, and gives back what guards the requests and the two sockets.
    pub(crate) fn keep_current(self, supervisor: &Supervisor) -> (Arc<Gate>, Option<Tls>, Option<Tls>) {
        let (gate, changes, stop) = (self.gate.clone(), self.changes, supervisor.token());
        supervisor
            .spawn_restarted("renew keys", move || gate.clone().keep_current(changes.clone(), stop.clone()));
        for tls in [&self.tls, &self.admin_tls].into_iter().flatten() {
            let (tls, stop) = (tls.clone(), supervisor.token());
            supervisor.spawn_restarted("renew certificates", move || tls.clone().keep_current(stop.clone()));
        }
        let (trust, stop) = (self.trust, supervisor.token());
        supervisor.spawn_restarted("renew what engines are known by", move || {
            trust.clone().keep_current(stop.clone())
        });
        (self.gate, self.tls, self.admin_tls)
    }

    /// One line for each listener.
    pub(crate) fn exposures(&self, options: &GatewayOptions, addresses: [SocketAddr; 2]) -> [Exposure; 2] {
        let [public, admin] = addresses;
        let certified = options.listeners.tls_client_ca.is_some();
        let open: Vec<&str> = options.access.admin_open.iter().filter_map(|path| path.path()).collect();
        let besides = match open.as_slice() {
            [] => String::new(),
            open => format!("; {} for everybody", open.join(", ")),
        };
        let admin_closed = self.gate.is_admin_closed();
        let registers = match (options.engines.registration, options.engines.registration_token.is_some()) {
            (true, false) if !admin_closed => {
                "; whoever reaches it can have prompts sent anywhere (--registration)"
            }
            _ => "",
        };
        [
            Exposure {
                listener: "public",
                address: public,
                guarded: self.gate.is_closed() || certified,
                tls: self.tls.is_some(),
                asks: match (self.gate.describe(), certified) {
                    (None, false) => "clients need no key".to_owned(),
                    (None, true) => "clients need a certificate".to_owned(),
                    (Some(keys), false) => format!("clients need {keys}"),
                    (Some(keys), true) => format!("clients need a certificate and {keys}"),
                },
            },
            Exposure {
                listener: "admin",
                address: admin,
                guarded: admin_closed,
                tls: self.admin_tls.is_some(),
                asks: match admin_closed {
                    true => format!("asks for a token, key or certificate{besides}"),
                    false => format!("decisions, predictions, metrics and engines for everybody{registers}"),
                },
            },
        ]
    }
}

/// What a listener lets in.
pub(crate) struct Exposure {
    listener: &'static str,
    address: SocketAddr,
    guarded: bool,
    tls: bool,
    asks: String,
}

impl Exposure {
    /// Open to a network without anybody being asked, or with keys that the network can read.
    fn is_worrying(&self) -> bool {
        let is_safe = self.guarded && self.tls;
        !(is_safe || self.address.ip().is_loopback())
    }

    /// Into the log; as a warning where a network can come in or listen.
    pub(crate) fn log(&self) {
        if self.is_worrying() {
            tracing::warn!("{self}");
        } else {
            tracing::info!("{self}");
        }
    }
}

impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listener, address, tls, asks, .. } = self;
        let tls = if *tls { "TLS" } else { "no TLS" };
        let reach = if address.ip().is_loopback() { " (this machine only)" } else { "" };
        write!(f, "{listener} listener {address}{reach}: {tls}; {asks}")
    }
}

impl OpenPath {
    fn path(self) -> Option<&'static str> {
        match self {
            OpenPath::Health => Some("/health"),
            OpenPath::Ready => Some("/ready"),
            OpenPath::Metrics => Some("/metrics"),
            OpenPath::None => None,
        }
    }
}

/// Loads all that guards the listeners, as a gateway with these settings would, and tells what would be open.
///
/// # Errors
/// [`GuardError`]
pub fn exposures(options: &GatewayOptions) -> Result<[String; 2], GuardError> {
    let guards = Guards::load(options)?;
    Ok(guards.exposures(options, [options.listen, options.admin_listen]).map(|exposure| exposure.to_string()))
}
