//! Flags for TLS with the store's other programs.

use std::path::PathBuf;

use moongate_runtime::{PeerTls, PeerTlsArgs, TlsConfigError};

use super::FlagValues;
use crate::ha::{TlsFiles, TlsIdentityFiles};

const FLAGS: [&str; 3] = ["--store_tls_cert", "--store_tls_key", "--store_tls_ca"];

/// Reads the TLS files; `None` if no flag is set.
pub(super) fn load(values: &FlagValues) -> Result<Option<PeerTls>, TlsConfigError> {
    options(values).load_named(FLAGS, "--store_tls_name")
}

/// The same files for the connections between masters.
pub(super) fn replication_files(values: &FlagValues) -> Option<TlsFiles> {
    let store = options(values);
    let identity = store
        .store_tls_cert
        .zip(store.store_tls_key)
        .map(|(certificate, key)| TlsIdentityFiles { certificate, key });
    Some(TlsFiles { ca: store.store_tls_ca?, identity, server_name: store.store_tls_name })
}

fn options(values: &FlagValues) -> PeerTlsArgs {
    let file = |name| values.optional(name).map(PathBuf::from);
    PeerTlsArgs {
        store_tls_cert: file("store_tls_cert"),
        store_tls_key: file("store_tls_key"),
        store_tls_ca: file("store_tls_ca"),
        store_tls_name: values.optional("store_tls_name"),
    }
}
