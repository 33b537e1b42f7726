//! A real store for the testbed: a master and a store node, each in a process of its own.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context as _;
use moongate_runtime::Supervisor;
use tokio::process::Child;

use super::process;
use crate::engine::OBJECT_BYTES;
use crate::simulate::StoreRetention;

/// Leases in real time. Engines read a page at once after they looked it up.
const LEASE_MS: u64 = 500;
/// Share of the memory above which a master evicts.
const HIGH_WATERMARK: f64 = 0.95;

/// A store to compare: which objects it keeps, and about which share of the requests it gets hints.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LiveStoreVariant {
    pub retention: StoreRetention,
    /// Share of the requests that say whether their prompt will be used again.
    pub return_hints: f64,
}

impl FromStr for LiveStoreVariant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, share) = text.split_once(':').unwrap_or((text, "0"));
        let retention = match name {
            "lru" => StoreRetention::Lru,
            "learned" => StoreRetention::Learned,
            _ => return Err(format!("`{name}` is not a retention policy: give `lru` or `learned`")),
        };
        let return_hints = share.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        let return_hints =
            return_hints.ok_or_else(|| format!("`{share}`: give a share of the requests, 0 to 1"))?;
        Ok(Self { retention, return_hints })
    }
}

impl fmt::Display for LiveStoreVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.retention_flag())?;
        if self.return_hints > 0.0 {
            write!(f, ", hints for {:.0} %", 100.0 * self.return_hints)?;
        }
        Ok(())
    }
}

impl LiveStoreVariant {
    fn retention_flag(&self) -> &'static str {
        if self.retention == StoreRetention::Learned { "learned" } else { "lru" }
    }
}

/// A running store. Its processes are killed on drop.
pub(super) struct LiveStore {
    _master: Child,
    _node: Child,
    /// `host:port` of the master's RPC port.
    pub(super) rpc: String,
    /// `host:port` of the master's admin server.
    pub(super) admin: String,
}

impl LiveStore {
    /// Starts an empty store that holds this many objects.
    pub(super) async fn start(
        program: &Path,
        variant: LiveStoreVariant,
        objects: u64,
        supervisor: &Supervisor,
    ) -> anyhow::Result<Self> {
        let flags = [
            "master".to_owned(),
            "--rpc_address=127.0.0.1".to_owned(),
            "--rpc_port=0".to_owned(),
            "--metrics_host=127.0.0.1".to_owned(),
            "--metrics_port=0".to_owned(),
            format!("--default_kv_lease_ttl={LEASE_MS}"),
            format!("--retention_policy={}", variant.retention_flag()),
        ];
        let (master, [admin, rpc]) = process::start(
            program,
            &flags,
            [("serving the admin interface", "admin="), ("serving Mooncake clients", "rpc=")],
            supervisor,
        )
        .await
        .context("store's master")?;
        let bytes = (objects * OBJECT_BYTES as u64) as f64 / HIGH_WATERMARK;
        let flags = [
            "store".to_owned(),
            "--port=0".to_owned(),
            format!("-Dmaster_server_address={rpc}"),
            "-Dlocal_hostname=127.0.0.1".to_owned(),
            "-Dmetadata_server=P2PHANDSHAKE".to_owned(),
            format!("-Dglobal_segment_size={:.0}", bytes.ceil()),
        ];
        let (node, [_]) = process::start(program, &flags, [("store node ready", "name=")], supervisor)
            .await
            .context("store node")?;
        Ok(Self { _master: master, _node: node, rpc, admin })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_have_a_retention_and_a_share() {
        let variant: LiveStoreVariant = "learned:0.5".parse().unwrap();
        assert_eq!(variant.to_string(), "learned, hints for 50 %");
        assert_eq!("lru".parse::<LiveStoreVariant>().unwrap().to_string(), "lru");
        for invalid in ["", "belady", "learned:2", "learned:x", "lru:-1"] {
            assert!(invalid.parse::<LiveStoreVariant>().unwrap_err().contains("give"), "{invalid}");
        }
    }
}
