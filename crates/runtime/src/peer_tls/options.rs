//! TLS settings shared by all programs of a store.

use std::path::PathBuf;

use clap::Args;

use super::{PeerTls, PeerTlsFiles};
use crate::TlsConfigError;

/// Mutual TLS with the other programs of a store.
#[derive(Debug, Clone, Default, Args)]
pub struct PeerTlsArgs {
    /// Certificate (PEM) for mutual TLS between store processes; reloaded on change. With it, all their connections use mutual TLS.
    /// Requires --store-tls-key and --store-tls-ca. Default: off, as Mooncake's programs do not support it.
    #[arg(
        long,
        global = true,
        alias = "store_tls_cert",
        value_name = "FILE",
        env = "MOONGATE_STORE_TLS_CERT"
    )]
    pub store_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --store-tls-cert.
    #[arg(long, global = true, alias = "store_tls_key", value_name = "FILE", env = "MOONGATE_STORE_TLS_KEY")]
    pub store_tls_key: Option<PathBuf>,

    /// CA certificate (PEM) that signs the certificates of all store processes. Use a CA that signs nothing else: any program with one of
    /// its certificates may use the store.
    #[arg(long, global = true, alias = "store_tls_ca", value_name = "FILE", env = "MOONGATE_STORE_TLS_CA")]
    pub store_tls_ca: Option<PathBuf>,

    /// Expected name in the certificates of store processes. Default: the host of each connection, which for pods is their address.
    #[arg(
        long,
        global = true,
        alias = "store_tls_name",
        value_name = "NAME",
        env = "MOONGATE_STORE_TLS_NAME"
    )]
    pub store_tls_name: Option<String>,
}

/// Flags that must be set together.
const FLAGS: [&str; 3] = ["--store-tls-cert", "--store-tls-key", "--store-tls-ca"];

impl PeerTlsArgs {
    /// Loads the files; `None` if no flag is set.
    ///
    /// # Errors
    /// [`TlsConfigError`] names the flag that is missing, or the file and its flag.
    pub fn load(&self) -> Result<Option<PeerTls>, TlsConfigError> {
        self.load_named(FLAGS, "--store-tls-name")
    }

    /// As [`PeerTlsArgs::load`], for a program with other flag names.
    ///
    /// # Errors
    /// As [`PeerTlsArgs::load`].
    pub fn load_named(&self, flags: [&str; 3], name_flag: &str) -> Result<Option<PeerTls>, TlsConfigError> {
        let files = [&self.store_tls_cert, &self.store_tls_key, &self.store_tls_ca];
        if let [Some(certificate), Some(key), Some(ca)] = files {
            let files = PeerTlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                ca: ca.clone(),
                name: self.store_tls_name.clone(),
            };
            let flagged = [(flags[0], Some(certificate)), (flags[1], Some(key)), (flags[2], Some(ca))];
            return PeerTls::load(files).map(Some).map_err(|error| error.with_flag(&flagged));
        }
        let given = files.iter().zip(flags).find(|(file, _)| file.is_some()).map(|(_, flag)| flag);
        let given = given.or(self.store_tls_name.as_ref().map(|_| name_flag));
        let missing = files.iter().zip(flags).find(|(file, _)| file.is_none()).map(|(_, flag)| flag);
        match given.zip(missing) {
            Some((given, missing)) => Err(TlsConfigError::IncompatibleSettings(format!(
                "{given} needs {missing}: {}, {} and {} must be set together",
                flags[0], flags[1], flags[2]
            ))),
            None => Ok(None),
        }
    }
}
