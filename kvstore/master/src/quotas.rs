//! File with the tenants' quotas: `--tenant_quota_connector_uri`.
//!
//! ```yaml
//! version: 1
//! tenants:
//!   - name: team-a
//!     quota: 16MB
//! ```
//!
//! A quota is an integer in bytes, or one with the unit `B`, `KB`, `MB`, `GB` or `TB` (powers of 1024). The file is read at the start and
//! rewritten with each change over HTTP, as in Mooncake's master.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use mooncake_wire::admin::TenantQuota;
use parking_lot::Mutex;
use serde::Deserialize;

/// Maximum file size in bytes.
const MAX_FILE: u64 = 16 << 20;
const VERSION: u64 = 1;
const UNITS: [(&str, u64); 5] =
    [("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)];

/// The quota file is unreadable or invalid.
#[derive(Debug, thiserror::Error)]
pub enum QuotaFileError {
    /// The file cannot be read.
    #[error("quota file {path}: {problem}", path = path.display())]
    Read { path: PathBuf, problem: io::Error },
    #[error("quota file {path}: {source}", path = path.display())]
    Invalid { path: PathBuf, source: QuotaContentError },
}

/// Why the content of a quota file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum QuotaContentError {
    #[error("larger than 16 MiB")]
    TooLarge,
    #[error(transparent)]
    Yaml(#[from] Box<serde_saphyr::Error>),
    #[error("unsupported version {0}; expected {VERSION}")]
    Version(u64),
    #[error("tenant name {0:?} is empty or occurs twice")]
    TenantName(String),
    #[error("invalid quota of {tenant:?}; expected 1 to 2^63 - 1 bytes, such as 1073741824 or 1GB")]
    Quota { tenant: String },
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

fn parse(text: &str) -> Result<Vec<(String, u64)>, QuotaContentError> {
    let contents: QuotaFileContents = serde_saphyr::from_str(text).map_err(Box::new)?;
    if contents.version != VERSION {
        return Err(QuotaContentError::Version(contents.version));
    }
    let mut names = HashSet::new();
    let mut quotas = Vec::new();
    for QuotaFileEntry { name, quota } in &contents.tenants {
        if name.is_empty() || !names.insert(name) {
            return Err(QuotaContentError::TenantName(name.clone()));
        }
        let invalid = || QuotaContentError::Quota { tenant: name.clone() };
        quotas.push((name.clone(), quota.bytes().ok_or_else(invalid)?));
    }
    Ok(quotas)
}

fn text(quotas: &[TenantQuota]) -> String {
    let mut text = format!("version: {VERSION}\n\ntenants:{}\n", if quotas.is_empty() { " []" } else { "" });
    for quota in quotas {
        // A JSON string is also a YAML string.
        let name = serde_json::Value::from(quota.tenant_id.as_str());
        text.push_str(&format!("  - name: {name}\n    quota: {}\n", quota.requested_quota_bytes));
    }
    text
}

/// A quota file that can be rewritten.
#[derive(Debug)]
pub struct QuotaFile {
    path: PathBuf,
    write_lock: Mutex<()>,
}

impl QuotaFile {
    /// Reads the tenants and their quotas.
    ///
    /// # Errors
    /// [`QuotaFileError`].
    pub fn read(path: &Path) -> Result<(Self, Vec<(String, u64)>), QuotaFileError> {
        let invalid = |source| QuotaFileError::Invalid { path: path.to_owned(), source };
        let failed = |problem| QuotaFileError::Read { path: path.to_owned(), problem };
        if fs::metadata(path).map_err(failed)?.len() > MAX_FILE {
            return Err(invalid(QuotaContentError::TooLarge));
        }
        let text = fs::read_to_string(path).map_err(failed)?;
        let quotas = parse(&text).map_err(invalid)?;
        Ok((Self::at(path), quotas))
    }

    /// A file that is only written.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), write_lock: Mutex::new(()) }
    }

    /// Writes the quotas that `quotas` returns under the write lock. After a crash the file has the old or the new contents.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn write(&self, quotas: impl FnOnce() -> Vec<TenantQuota>) -> io::Result<()> {
        let _write_guard = self.write_lock.lock();
        let temporary = self.path.with_added_extension("tmp");
        let mut file = File::create(&temporary)?;
        file.write_all(text(&quotas()).as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &self.path)
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
    fn amounts_are_parsed_as_in_mooncake() {
        let list = |amount: &str| parse(&format!("version: 1\ntenants:\n  - name: a\n    quota: {amount}\n"));
        for (amount, bytes) in [("16", 16), ("16B", 16), ("\"7\"", 7), ("16MB", 16 << 20), ("2TB", 2 << 40)] {
            assert_eq!(list(amount).unwrap(), [("a".to_owned(), bytes)], "{amount}");
        }
        for amount in ["0", "-1", "1.5GB", "16 MiB", "16k", "7M", "1kb", "MB", "9999999999TB", "[]"] {
            assert!(list(amount).is_err(), "{amount}");
        }
    }

    #[test]
    fn invalid_files_are_rejected() {
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
        assert!(parse("version: 1\ntenants: []").unwrap().is_empty());
    }

    #[test]
    fn quota_files_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quotas.yaml");
        assert!(QuotaFile::read(&path).is_err(), "the file must exist");
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
