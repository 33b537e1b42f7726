//! Where requests come in: who asks, and whether that is allowed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use moongate_runtime::{FileChangeWatcher, SecretString};
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

use super::caller::{AccessScope, AuthenticatedCaller};
use super::file::AccessFile;
use super::jwt::{JwtRejection, VerificationKeySet};
use super::quota::{QuotaKind, QuotaPermit, QuotaTracker};
use crate::config::{AccessOptions, JwtRequirements};
use crate::error::{ApiError, ApiErrorCode};

/// A file that decides who may ask cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {}: {problem}", path.display())]
pub struct AccessFileError {
    flag: &'static str,
    path: PathBuf,
    problem: String,
}

/// A request that is not let in, and why, in one word for the metrics.
#[derive(Debug)]
pub(crate) struct AccessRejection {
    pub(crate) reason: &'static str,
    pub(crate) error: ApiError,
}

/// What was read from a file, and what is read from it later.
struct ReloadableFile<T> {
    flag: &'static str,
    path: PathBuf,
    parse: fn(&std::path::Path) -> Result<T, String>,
    current: ArcSwap<T>,
}

impl<T> ReloadableFile<T> {
    fn load(
        flag: &'static str,
        path: &std::path::Path,
        read: fn(&std::path::Path) -> Result<T, String>,
    ) -> Result<Self, AccessFileError> {
        let wrong = |problem| AccessFileError { flag, path: path.to_owned(), problem };
        let now = ArcSwap::from_pointee(read(path).map_err(wrong)?);
        Ok(Self { flag, path: path.to_owned(), parse: read, current: now })
    }

    /// Reads the file again. What is wrong changes nothing, so that a slip of the hand shuts nobody out.
    fn reload(&self, describe: impl Fn(&T) -> usize) {
        let (flag, file) = (self.flag, self.path.display());
        match (self.parse)(&self.path) {
            Ok(value) => {
                tracing::info!(flag, %file, keys = describe(&value), "read again");
                self.current.store(Arc::new(value));
            }
            Err(problem) => {
                tracing::warn!(flag, %file, problem, "cannot be used; what was read before stays in force");
            }
        }
    }
}

impl<T> std::fmt::Debug for ReloadableFile<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Knows keys, tokens and quotas. What its files say is renewed while it is used.
#[derive(Debug)]
pub(crate) struct AccessControl {
    file: Option<ReloadableFile<AccessFile>>,
    jwt: Option<(ReloadableFile<VerificationKeySet>, JwtRequirements)>,
    admin_token: Option<SecretString>,
    /// Whether a client's certificate opens the admin listener.
    admin_certificates: bool,
    quotas: QuotaTracker,
}

impl AccessControl {
    pub(crate) fn load(options: &AccessOptions, admin_certificates: bool) -> Result<Self, AccessFileError> {
        let file = options.access_file.as_deref();
        let provider = match (options.jwks_file.as_deref(), options.token_rules()) {
            (Some(path), Some(rules)) => {
                Some((ReloadableFile::load("--jwks-file", path, VerificationKeySet::read)?, rules))
            }
            (Some(path), None) => {
                let problem =
                    "--jwt-issuer and --jwt-audience are needed too, or tokens for others would be taken"
                        .to_owned();
                return Err(AccessFileError { flag: "--jwks-file", path: path.to_owned(), problem });
            }
            _ => None,
        };
        Ok(Self {
            file: file
                .map(|path| ReloadableFile::load("--access-file", path, AccessFile::read))
                .transpose()?,
            jwt: provider,
            admin_token: options.admin_token.clone(),
            admin_certificates,
            quotas: QuotaTracker::default(),
        })
    }

    /// Whether clients are asked who they are.
    pub(crate) fn requires_authentication(&self) -> bool {
        self.file.is_some() || self.jwt.is_some()
    }

    /// What clients are asked for, in words; `None`: nothing.
    pub(crate) fn describe(&self) -> Option<String> {
        let keys =
            self.file.as_ref().map(|held| format!("an API key ({} known)", held.current.load().keys()));
        let tokens = self.jwt.as_ref().map(|(_, rules)| format!("a token of {}", rules.issuer));
        let asked: Vec<String> = keys.into_iter().chain(tokens).collect();
        (!asked.is_empty()).then(|| asked.join(" or "))
    }

    /// Whether the admin listener asks.
    pub(crate) fn admin_requires_authentication(&self) -> bool {
        self.file.is_some() || self.admin_token.is_some() || self.admin_certificates
    }

    /// Reads files again when they change. `changes` must be older than what was read.
    pub(crate) async fn watch_files(self: Arc<Self>, changes: FileChangeWatcher, stop: CancellationToken) {
        let renewed = || {
            if let Some(held) = &self.file {
                held.reload(AccessFile::keys);
            }
            if let Some((held, _)) = &self.jwt {
                held.reload(VerificationKeySet::len);
            }
        };
        changes.watch(stop, renewed).await;
    }

    /// Who asks at the public listener. `None`: nobody is asked.
    pub(crate) fn authenticate_client(
        &self,
        headers: &HeaderMap,
    ) -> Result<Option<AuthenticatedCaller>, AccessRejection> {
        if !self.requires_authentication() {
            return Ok(None);
        }
        let caller = self.authenticate(headers)?;
        if !caller.has_scope(AccessScope::Inference) {
            return Err(forbidden(AccessScope::Inference));
        }
        Ok(Some(caller))
    }

    /// Whether whoever sends these headers may do what needs `scope` at the admin listener; `certified`: it has shown a certificate.
    pub(crate) fn authenticate_administrator(
        &self,
        headers: &HeaderMap,
        certified: bool,
        scope: AccessScope,
    ) -> Result<(), AccessRejection> {
        if !self.admin_requires_authentication() || (self.admin_certificates && certified) {
            return Ok(());
        }
        let given = bearer_token(headers)?;
        if self.admin_token.as_ref().is_some_and(|token| bool::from(token.expose().as_bytes().ct_eq(given))) {
            return Ok(());
        }
        let caller = self.file.as_ref().and_then(|held| held.current.load().find(given).cloned());
        match caller {
            Some(caller) if caller.has_scope(scope) => Ok(()),
            Some(_) => Err(forbidden(scope)),
            None => Err(invalid_key(
                "the admin listener does not know this token; it wants --admin-token, or a key with the scope `admin`",
            )),
        }
    }

    fn authenticate(&self, headers: &HeaderMap) -> Result<AuthenticatedCaller, AccessRejection> {
        let given = bearer_token(headers)?;
        if let Some(caller) = self.file.as_ref().and_then(|held| held.current.load().find(given).cloned()) {
            return Ok(caller);
        }
        let Some((keys, rules)) = &self.jwt else {
            return Err(invalid_key("the API key is not known; check it, or ask for one"));
        };
        keys.current.load().verify(given, rules).map_err(|unfit| match unfit {
            JwtRejection::Invalid(reason) => invalid_key(&format!("the token is not accepted: {reason}")),
            JwtRejection::MissingScope => forbidden(AccessScope::Inference),
        })
    }

    /// Counts a request of `caller` against its tenant's quota, until the permit is dropped.
    pub(crate) fn admit(&self, caller: &AuthenticatedCaller) -> Result<Option<QuotaPermit>, AccessRejection> {
        let Some(held) = &self.file else { return Ok(None) };
        let file = held.current.load();
        self.quotas.try_admit(&caller.tenant, |name| file.quota(name), Instant::now()).map_err(
            |(bound, after)| {
                let (reason, what) = match bound {
                    QuotaKind::Requests => ("requests_per_second", "requests per second"),
                    QuotaKind::InputTokens => ("input_tokens_per_second", "prompt tokens per second"),
                    QuotaKind::Concurrency => ("concurrent_requests", "requests at once"),
                };
                let text =
                    format!("{} has used its {what}; ask again after the time in Retry-After", caller.tenant);
                let mut error = ApiError::new(ApiErrorCode::RateLimited, text);
                error.retry_after = Some(after);
                AccessRejection { reason, error }
            },
        )
    }
}

fn bearer_token(headers: &HeaderMap) -> Result<&[u8], AccessRejection> {
    const SCHEME: &[u8] = b"bearer ";
    let given = headers.get(AUTHORIZATION).map(http::HeaderValue::as_bytes);
    let given = given.and_then(|value| {
        let (scheme, rest) = value.split_at_checked(SCHEME.len())?;
        scheme.eq_ignore_ascii_case(SCHEME).then_some(rest.trim_ascii())
    });
    given.filter(|given| !given.is_empty()).ok_or_else(|| {
        let text = "no API key was sent; send it as `authorization: Bearer KEY`";
        AccessRejection { reason: "missing_key", error: ApiError::new(ApiErrorCode::InvalidApiKey, text) }
    })
}

fn invalid_key(text: &str) -> AccessRejection {
    AccessRejection { reason: "wrong_key", error: ApiError::new(ApiErrorCode::InvalidApiKey, text) }
}

fn forbidden(scope: AccessScope) -> AccessRejection {
    let text = format!("the key is known, but not for this: it lacks the scope `{}`", scope.as_str());
    AccessRejection {
        reason: "wrong_scope",
        error: ApiError::new(ApiErrorCode::InsufficientPermissions, text),
    }
}
