//! Settings of TLS between the programs of a store, which every program has that is part of one.

use std::path::PathBuf;

use clap::Args;

use super::{PeerTls, PeerTlsFiles};
use crate::TlsConfigError;

/// Mutual TLS with the other programs of a store.
#[derive(Debug, Clone, Default, Args)]
pub struct PeerTlsArgs {
    /// Certificate (PEM) that this program shows to the other programs of the store, as server and as client; re-read when it changes. With
    /// it, all their connections are TLS with certificates. Needs --store-tls-key and --store-tls-ca. Off by default: Mooncake's programs
    /// do not have this.
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

    /// Authority (PEM) that has signed the certificates of the store's programs. Use one that signs nothing else: any program with a certificate
    /// of it may use the store.
    #[arg(long, global = true, alias = "store_tls_ca", value_name = "FILE", env = "MOONGATE_STORE_TLS_CA")]
    pub store_tls_ca: Option<PathBuf>,

    /// Name that the certificates of the store's programs have. Default: the host that is connected to, which for pods is their address.
    #[arg(
        long,
        global = true,
        alias = "store_tls_name",
        value_name = "NAME",
        env = "MOONGATE_STORE_TLS_NAME"
    )]
    pub store_tls_name: Option<String>,
}

/// The settings that must be given together.
const FLAGS: [&str; 3] = ["--store-tls-cert", "--store-tls-key", "--store-tls-ca"];

impl PeerTlsArgs {
    /// Reads the files; nothing if there are to be none.
    ///
    /// # Errors
    /// [`TlsConfigError`] names the flag that is missing, or the file and its flag.
    pub fn load(&self) -> Result<Option<PeerTls>, TlsConfigError> {
        self.load_named(FLAGS, "--store-tls-name")
    }

    /// The same for a program whose flags have other names.
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
                "{given} needs {missing}: {}, {} and {} are set together or not at all",
                flags[0], flags[1], flags[2]
            ))),
            None => Ok(None),
        }
    }
}
