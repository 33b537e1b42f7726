//! The access file: API keys with their tenants and scopes, and the tenants' quotas.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::caller::{AccessScope, AuthenticatedCaller};
use super::quota::{QuotaError, TrafficQuota};
use crate::reloadable_file::{BoundedReadError, read_limited};

/// Largest access file in bytes: more than a Kubernetes Secret can hold (1 MiB).
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Shortest key in characters: a shorter one could be guessed.
const MIN_KEY_LEN: usize = 16;
/// Longest tenant name in bytes.
pub(super) const MAX_TENANT_LEN: usize = 256;

type KeyDigest = [u8; 32];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessConfig {
    #[serde(default)]
    key: Vec<ApiKeyConfig>,
    #[serde(default)]
    quota: TrafficQuota,
    #[serde(default)]
    tenant: BTreeMap<String, TrafficQuota>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApiKeyConfig {
    sha256: Option<String>,
    key: Option<String>,
    tenant: String,
    #[serde(default = "default_scopes")]
    scopes: BTreeSet<AccessScope>,
}

fn default_scopes() -> BTreeSet<AccessScope> {
    BTreeSet::from([AccessScope::Inference])
}

/// Why an access file cannot be used. It never quotes the content, which has keys.
#[derive(Debug, thiserror::Error)]
pub enum AccessConfigError {
    #[error(transparent)]
    Read(#[from] BoundedReadError),
    /// The file is not TOML, or has an unknown or missing key. TOML's own error is not kept: it quotes the line.
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: String },
    #[error("[{table}]: {source}")]
    Quota { table: String, source: QuotaError },
    /// `number` is the key's position in the file, counted from 1.
    #[error("[[key]] number {number}: {source}")]
    Key { number: usize, source: ApiKeyError },
}

/// Why one `[[key]]` of an access file is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ApiKeyError {
    #[error("sha256 is not a SHA-256: 64 hexadecimal digits, as sha256sum prints them")]
    Digest,
    #[error("key is shorter than {MIN_KEY_LEN} characters, and could be guessed")]
    TooShort,
    #[error("key has characters that are invalid in a header; use visible ASCII")]
    Characters,
    /// Both or neither are set.
    #[error("give either sha256 or key")]
    DigestOrKey,
    #[error("tenant is a name of 1 to {MAX_TENANT_LEN} bytes")]
    Tenant,
    #[error("scopes is empty, so that the key permits nothing; omit it for `inference`")]
    NoScopes,
    #[error("duplicate key")]
    Duplicate,
}

/// The parsed access file. Keys are stored as SHA-256 digests only.
#[derive(Debug, Default)]
pub(super) struct AccessFile {
    keys: HashMap<KeyDigest, AuthenticatedCaller>,
    default_quota: TrafficQuota,
    tenants: BTreeMap<String, TrafficQuota>,
}

impl AccessFile {
    /// Reads and checks the file.
    pub(super) fn read(path: &Path) -> Result<Self, AccessConfigError> {
        Self::parse(&read_limited(path, MAX_FILE_BYTES)?)
    }

    fn parse(text: &str) -> Result<Self, AccessConfigError> {
        let config: AccessConfig = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            AccessConfigError::Syntax { line, problem: error.message().to_owned() }
        })?;
        let mut file = Self { default_quota: config.quota, tenants: config.tenant, ..Self::default() };
        for (name, quota) in &file.tenants {
            let table = || format!("tenant.{name}");
            quota.check().map_err(|source| AccessConfigError::Quota { table: table(), source })?;
        }
        let table = || "quota".to_owned();
        file.default_quota.check().map_err(|source| AccessConfigError::Quota { table: table(), source })?;
        for (index, key) in config.key.into_iter().enumerate() {
            let invalid = |source| AccessConfigError::Key { number: index + 1, source };
            let (hash, caller) = key.validate().map_err(invalid)?;
            if file.keys.insert(hash, caller).is_some() {
                return Err(invalid(ApiKeyError::Duplicate));
            }
        }
        Ok(file)
    }

    pub(super) fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Finds the caller by key. Only digests are compared, so that timing reveals nothing about a key.
    pub(super) fn find(&self, key: &[u8]) -> Option<&AuthenticatedCaller> {
        let hash: KeyDigest = Sha256::digest(key).into();
        let (stored_hash, caller) = self.keys.get_key_value(&hash)?;
        bool::from(stored_hash.ct_eq(&hash)).then_some(caller)
    }

    /// Quota of a tenant: its own table, else `[quota]`.
    pub(super) fn quota(&self, tenant: &str) -> TrafficQuota {
        self.tenants.get(tenant).copied().unwrap_or(self.default_quota)
    }
}

/// Parses an access file and returns the tenant of each of `keys`: for fuzzing.
///
/// # Errors
///
/// [`AccessConfigError`] if the text is not a valid access file.
pub fn tenants_of_keys(text: &str, keys: &[&[u8]]) -> Result<Vec<Option<Arc<str>>>, AccessConfigError> {
    let file = AccessFile::parse(text)?;
    Ok(keys.iter().map(|key| file.find(key).map(|caller| Arc::clone(&caller.tenant))).collect())
}

impl ApiKeyConfig {
    fn validate(self) -> Result<(KeyDigest, AuthenticatedCaller), ApiKeyError> {
        let hash = match (&self.sha256, &self.key) {
            (Some(hex), None) => parse_hash(hex).ok_or(ApiKeyError::Digest)?,
            (None, Some(key)) if key.len() < MIN_KEY_LEN => return Err(ApiKeyError::TooShort),
            (None, Some(key)) if !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                return Err(ApiKeyError::Characters);
            }
            (None, Some(key)) => Sha256::digest(key.as_bytes()).into(),
            _ => return Err(ApiKeyError::DigestOrKey),
        };
        if self.tenant.is_empty() || self.tenant.len() > MAX_TENANT_LEN {
            return Err(ApiKeyError::Tenant);
        }
        if self.scopes.is_empty() {
            return Err(ApiKeyError::NoScopes);
        }
        Ok((hash, AuthenticatedCaller { tenant: Arc::from(self.tenant), scopes: Arc::new(self.scopes) }))
    }
}

fn parse_hash(hex: &str) -> Option<KeyDigest> {
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    let mut hash = KeyDigest::default();
    for (byte, digits) in hash.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASHED: &str = "2b87a2d6c58ecac6d4b8c7d3af2c1ea9f1a6a2a1d4f7ad9b9ee9a1b5b1d0c0de";

    #[test]
    fn keys_are_found_by_their_hash_with_tenant_and_scopes() {
        let hash = Sha256::digest(b"a-key-of-sufficient-length");
        let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!(
            "[[key]]\nsha256 = \"{hex}\"\ntenant = \"a\"\n\
             [[key]]\nkey = \"another-key-in-plain-text\"\ntenant = \"b\"\nscopes = [\"admin\"]\n\
             [quota]\nrequests_per_second = 2\n[tenant.b]\nconcurrent_requests = 3\n"
        );
        let file = AccessFile::parse(&text).unwrap();
        let a = file.find(b"a-key-of-sufficient-length").unwrap();
        assert_eq!(
            (&*a.tenant, a.has_scope(AccessScope::Inference), a.has_scope(AccessScope::Admin)),
            ("a", true, false)
        );
        let b = file.find(b"another-key-in-plain-text").unwrap();
        assert_eq!(
            (&*b.tenant, b.has_scope(AccessScope::Inference), b.has_scope(AccessScope::Metrics)),
            ("b", false, true)
        );
        assert!(file.find(b"a-key-of-sufficient-lengtH").is_none());
        assert!(file.find(b"").is_none());
        assert_eq!(file.quota("a").requests_per_second, Some(2.0));
        assert_eq!(file.quota("b").concurrent_requests, Some(3));
        assert_eq!(
            file.quota("b").requests_per_second,
            None,
            "a tenant's own table replaces the default quota"
        );
        assert!(!format!("{file:?}").contains("plain-text"));
    }

    #[test]
    fn errors_name_the_position_and_not_the_key() {
        let secret = "sk-very-secret-key-1234";
        for (text, part) in [
            (format!("[[key]]\nkey = \"{secret}\"\n"), "tenant"),
            (format!("[[key]]\nkey = \"{secret}\ntenant = \"a\"\n"), "line 2"),
            (format!("[[key]]\nkey = \"{secret}\"\ntenant = \"a\"\nscope = \"x\""), "line 4"),
            (format!("[[key]]\nkey = \"{secret}\"\ntenant = \"a\"\nscopes = [\"root\"]"), "inference"),
            (format!("[[key]]\nkey = \"{secret}\"\ntenant = \"a\"\nscopes = []"), "number 1"),
            (format!("[[key]]\nkey = \"{secret}\"\nsha256 = \"{HASHED}\"\ntenant = \"a\""), "either"),
            (format!("[[key]]\nsha256 = \"{secret}\"\ntenant = \"a\""), "64 hex"),
            ("[[key]]\nkey = \"short\"\ntenant = \"a\"".to_owned(), "guessed"),
            (format!("[[key]]\nkey = \"{secret}\"\ntenant = \"\""), "tenant"),
            (format!("[[key]]\nkey = \"{secret}\"\ntenant = \"a\"\n").repeat(2), "number 2"),
            ("[quota]\nrequests_per_second = 0".to_owned(), "[quota]"),
            ("[tenant.a]\nconcurrent_requests = -1".to_owned(), "line 2"),
        ] {
            let error = AccessFile::parse(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains("very-secret"), "{error}");
        }
    }
}
