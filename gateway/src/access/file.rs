//! The access file: API keys with their tenants and scopes, and the tenants' quotas.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::bounded::read_limited;
use super::caller::{AccessScope, AuthenticatedCaller};
use super::quota::TrafficQuota;

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

/// The parsed access file. Keys are stored as SHA-256 digests only.
#[derive(Debug, Default)]
pub(super) struct AccessFile {
    keys: HashMap<KeyDigest, AuthenticatedCaller>,
    default_quota: TrafficQuota,
    tenants: BTreeMap<String, TrafficQuota>,
}

impl AccessFile {
    /// Reads and checks the file. The error names the line and the problem but never quotes the content.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        Self::parse(&read_limited(path, MAX_FILE_BYTES)?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let config: AccessConfig = toml::from_str(text).map_err(|error| {
            // The TOML error itself would quote the line, and with it possibly a key.
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            format!("line {}: {}", before.matches('\n').count() + 1, error.message())
        })?;
        let mut file = Self { default_quota: config.quota, tenants: config.tenant, ..Self::default() };
        for (name, quota) in
            file.tenants.iter().map(|(name, quota)| (name.as_str(), quota)).chain([("", &file.default_quota)])
        {
            quota.check().map_err(|problem| match name {
                "" => format!("[quota]: {problem}"),
                name => format!("[tenant.{name}]: {problem}"),
            })?;
        }
        for (index, key) in config.key.into_iter().enumerate() {
            let (hash, caller) =
                key.validate().map_err(|problem| format!("[[key]] number {}: {problem}", index + 1))?;
            if file.keys.insert(hash, caller).is_some() {
                return Err(format!("[[key]] number {}: duplicate key", index + 1));
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
/// The text is not a valid access file.
pub fn tenants_of_keys(text: &str, keys: &[&[u8]]) -> Result<Vec<Option<Arc<str>>>, String> {
    let file = AccessFile::parse(text)?;
    Ok(keys.iter().map(|key| file.find(key).map(|caller| Arc::clone(&caller.tenant))).collect())
}

impl ApiKeyConfig {
    fn validate(self) -> Result<(KeyDigest, AuthenticatedCaller), String> {
        let hash = match (&self.sha256, &self.key) {
            (Some(hex), None) => parse_hash(hex)
                .ok_or("sha256 is not a SHA-256: 64 hexadecimal digits, as sha256sum prints them")?,
            (None, Some(key)) if key.len() < MIN_KEY_LEN => {
                return Err(format!("key is shorter than {MIN_KEY_LEN} characters, and could be guessed"));
            }
            (None, Some(key)) if !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                return Err("key has characters that are invalid in a header; use visible ASCII".to_owned());
            }
            (None, Some(key)) => Sha256::digest(key.as_bytes()).into(),
            _ => return Err("give either sha256 or key".to_owned()),
        };
        if self.tenant.is_empty() || self.tenant.len() > MAX_TENANT_LEN {
            return Err(format!("tenant is a name of 1 to {MAX_TENANT_LEN} bytes"));
        }
        if self.scopes.is_empty() {
            return Err(
                "scopes is empty, so that the key permits nothing; omit it for `inference`".to_owned()
            );
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
            let error = AccessFile::parse(&text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains("very-secret"), "{error}");
        }
    }
}
