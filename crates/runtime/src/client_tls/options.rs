//! TLS settings for connections to engines, shared by all commands that connect to them.

use std::path::PathBuf;

use clap::Args;

use super::{ClientTls, ClientTlsFiles};
use crate::TlsConfigError;

/// TLS settings for engines.
#[derive(Debug, Clone, Args)]
pub struct EngineTlsArgs {
    /// CA certificates (PEM) for engines with https:// URLs; reloaded on change. Default: the system store.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ENGINE_CA")]
    pub engine_ca: Option<PathBuf>,

    /// Client certificate (PEM) for engines that require mTLS; reloaded on change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ENGINE_TLS_CERT")]
    pub engine_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --engine-tls-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ENGINE_TLS_KEY")]
    pub engine_tls_key: Option<PathBuf>,

    /// Expected server name in engine certificates. Default: the host in each engine's URL, which for pods found in Kubernetes is their
    /// address.
    #[arg(long, value_name = "NAME", env = "MOONGATE_ENGINE_TLS_NAME")]
    pub engine_tls_name: Option<String>,
}

impl EngineTlsArgs {
    /// Loads the configured files.
    ///
    /// # Errors
    /// [`TlsConfigError`] names the flag that is missing, or the file.
    pub fn trust(&self) -> Result<ClientTls, TlsConfigError> {
        let identity = [self.engine_tls_cert.as_ref(), self.engine_tls_key.as_ref()];
        let flags = ["--engine-tls-cert", "--engine-tls-key"];
        let name = self.engine_tls_name.as_ref();
        let loaded = ClientTlsFiles::from_options(self.engine_ca.as_ref(), identity, name, flags)
            .and_then(ClientTls::load);
        let files =
            [("--engine-ca", self.engine_ca.as_ref()), (flags[0], identity[0]), (flags[1], identity[1])];
        loaded.map_err(|error| error.with_flag(&files))
    }
}
