//! Flags of TLS with the store's other programs.

use std::path::PathBuf;

use moongate_runtime::{PeerTls, PeerTlsOptions, TlsError};

use super::Values;
use crate::ha::TlsFiles;

const FLAGS: [&str; 3] = ["--store_tls_cert", "--store_tls_key", "--store_tls_ca"];

/// Reads the files; nothing if there are to be none.
pub(super) fn load(values: &Values) -> Result<Option<PeerTls>, TlsError> {
    options(values).load_named(FLAGS, "--store_tls_name")
}

/// The same files for masters among themselves.
pub(super) fn replication_files(values: &Values) -> Option<TlsFiles> {
    let store = options(values);
    let own = store.store_tls_cert.zip(store.store_tls_key);
    Some(TlsFiles { ca: store.store_tls_ca?, own, name: store.store_tls_name })
}

fn options(values: &Values) -> PeerTlsOptions {
    let file = |name| values.optional(name).map(PathBuf::from);
    PeerTlsOptions {
        store_tls_cert: file("store_tls_cert"),
        store_tls_key: file("store_tls_key"),
        store_tls_ca: file("store_tls_ca"),
        store_tls_name: values.optional("store_tls_name"),
    }
}
