//! The file in which tenants' quotas are kept: `--tenant_quota_connector_uri`.
//!
//! ```yaml
//! version: 1
//! tenants:
//!   - name: team-a
//!     quota: 16MB
//! ```
//!
//! A quota is a whole number of bytes, or one with `B`, `KB`, `MB`, `GB` or `TB` (powers of 1024). The file is read at the start and
//! written anew with each change over HTTP, as Mooncake's master does it.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use mooncake_wire::admin::TenantQuota;
use parking_lot::Mutex;
use serde::Deserialize;

/// Largest file, in bytes.
const MAX_FILE: u64 = 16 << 20;
const VERSION: u64 = 1;
const UNITS: [(&str, u64); 5] =
    [("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)];

/// The file says something else than quotas.
#[derive(Debug, thiserror::Error)]
pub enum QuotaFileError {
    /// It cannot be read.
    #[error("the file of tenants' quotas, {path}: {problem}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the file system says.
        problem: io::Error,
    },
    /// It can be read, but not understood.
    #[error("the file of tenants' quotas, {path}: {problem}", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Deserialize)]
struct QuotaFileContents {
    version: u64,
    tenants: Vec<QuotaFileEntry>,
}

#[derive(Deserialize)]
struct QuotaFileEntry {
    name: String,
    quota: QuotaAmount,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum QuotaAmount {
    Bytes(u64),
    Text(String),
}

impl QuotaAmount {
    fn bytes(&self) -> Option<u64> {
        let bytes = match self {
            Self::Bytes(bytes) => Some(*bytes),
            Self::Text(text) => {
                let (digits, unit) = UNITS
                    .iter()
                    .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
                    .unwrap_or((text, 1));
                let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
                digits.parse::<u64>().ok().filter(|_| is_number).and_then(|number| number.checked_mul(unit))
            }
        };
        bytes.filter(|bytes| (1..=i64::MAX as u64).contains(bytes))
    }
}

fn parse(text: &str) -> Result<Vec<(String, u64)>, String> {
    let listed: QuotaFileContents = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if listed.version != VERSION {
        return Err(format!("its version is {}, and {VERSION} is the only one there is", listed.version));
    }
    let mut names = HashSet::new();
    let mut quotas = Vec::new();
    for QuotaFileEntry { name, quota } in &listed.tenants {
        if name.is_empty() || !names.insert(name) {
            return Err(format!("tenant {name:?} has no name, or is there twice"));
        }
        let wrong = || {
            format!(
                "the quota of {name:?} is not a number of bytes such as 1073741824 or 1GB, from 1 to 2^63 - 1"
            )
        };
        quotas.push((name.clone(), quota.bytes().ok_or_else(wrong)?));
    }
    Ok(quotas)
}

fn text(quotas: &[TenantQuota]) -> String {
    let mut text = format!("version: {VERSION}\n\ntenants:{}\n", if quotas.is_empty() { " []" } else { "" });
    for quota in quotas {
        // A text of JSON is one of YAML too.
        let name = serde_json::Value::from(quota.tenant_id.as_str());
        text.push_str(&format!("  - name: {name}\n    quota: {}\n", quota.requested_quota_bytes));
    }
    text
}

/// A file with quotas.
#[derive(Debug)]
pub struct QuotaFile {
    path: PathBuf,
    write_lock: Mutex<()>,
}

impl QuotaFile {
    /// Reads tenants and their quotas.
    ///
    /// # Errors
    /// [`QuotaFileError`].
    pub fn read(path: &Path) -> Result<(Self, Vec<(String, u64)>), QuotaFileError> {
        let wrong = |problem| QuotaFileError::Invalid { path: path.to_owned(), problem };
        let failed = |problem| QuotaFileError::Read { path: path.to_owned(), problem };
        if fs::metadata(path).map_err(failed)?.len() > MAX_FILE {
            return Err(wrong("it is larger than 16 MiB".to_owned()));
        }
        let text = fs::read_to_string(path).map_err(failed)?;
        let quotas = parse(&text).map_err(wrong)?;
        Ok((Self::at(path), quotas))
    }

    /// A file that is written only.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), write_lock: Mutex::new(()) }
    }

    /// Writes the quotas that there are when it is this call's turn. After a crash the file is the old one or the new one.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, quotas: impl FnOnce() -> Vec<TenantQuota>) -> io::Result<()> {
        let _writing = self.write_lock.lock();
        let unfinished = self.path.with_added_extension("tmp");
        let mut file = File::create(&unfinished)?;
        file.write_all(text(&quotas()).as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(tenant: &str, bytes: u64) -> TenantQuota {
        TenantQuota {
            tenant_id: tenant.to_owned(),
            requested_quota_bytes: bytes,
            effective_quota_bytes: 0,
            charged_bytes: 0,
            admission_closed: false,
            over_quota: false,
            has_explicit_policy: true,
        }
    }

    #[test]
    fn amounts_are_those_that_mooncake_takes() {
        let list = |amount: &str| parse(&format!("version: 1\ntenants:\n  - name: a\n    quota: {amount}\n"));
        for (amount, bytes) in [("16", 16), ("16B", 16), ("\"7\"", 7), ("16MB", 16 << 20), ("2TB", 2 << 40)] {
            assert_eq!(list(amount), Ok(vec![("a".to_owned(), bytes)]), "{amount}");
        }
        for amount in ["0", "-1", "1.5GB", "16 MiB", "16k", "7M", "1kb", "MB", "9999999999TB", "[]"] {
            assert!(list(amount).is_err(), "{amount}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        for text in [
            "",
            "version: 1",
            "version: 2\ntenants: []",
            "tenants: []",
            "version: 1\ntenants: 5",
            "version: 1\ntenants: [{name: a, quota: 1}, {name: a, quota: 2}]",
            "version: 1\ntenants: [{name: '', quota: 1}]",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse("version: 1\ntenants: []"), Ok(Vec::new()));
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quotas.yaml");
        assert!(QuotaFile::read(&path).is_err(), "it must be there");
        fs::write(&path, "version: 1\ntenants: []\n").unwrap();
        let (file, _) = QuotaFile::read(&path).unwrap();
        file.write(|| vec![quota("t0", 16 << 20), quota("a \"b\"\n: #", 1)]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("version: 1\n\ntenants:\n  - name: \"t0\"\n    quota: 16777216\n"),
            "{text}"
        );
        let (file, quotas) = QuotaFile::read(&path).unwrap();
        assert_eq!(quotas, [("t0".to_owned(), 16 << 20), ("a \"b\"\n: #".to_owned(), 1)]);
        file.write(Vec::new).unwrap();
        assert_eq!(QuotaFile::read(&path).unwrap().1, []);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
