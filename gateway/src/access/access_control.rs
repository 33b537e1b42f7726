//! Access control of both listeners: authentication, scopes and quotas.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use http::HeaderMap;
use moongate_runtime::{FileChangeWatcher, SecretString};
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

use super::caller::{AccessScope, AuthenticatedCaller};
use super::file::{AccessConfigError, AccessFile};
use super::jwt::{JwksError, JwtRejection, VerificationKeySet};
use super::options::{AccessOptions, JwtRequirements};
use super::presented_key::{PresentedKeyError, presented_key};
use super::quota::{QuotaKind, QuotaPermit, QuotaTracker};
use crate::error::{ApiError, ApiErrorCode};
use crate::reloadable_file::ReloadableFile;

const ACCESS_FILE_FLAG: &str = "--access-file";
const JWKS_FILE_FLAG: &str = "--jwks-file";

/// An access file or JWKS file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AccessFileError {
    #[error("{ACCESS_FILE_FLAG} {}: {source}", path.display())]
    Access { path: PathBuf, source: AccessConfigError },
    #[error("{JWKS_FILE_FLAG} {}: {source}", path.display())]
    Jwks { path: PathBuf, source: JwksError },
    /// A JWKS file is set, but not the claims that its tokens must have.
    #[error(
        "{JWKS_FILE_FLAG} {}: --jwt-issuer and --jwt-audience are required too: without them, tokens for other services would be accepted",
        .0.display()
    )]
    NoTokenRules(PathBuf),
}

/// A rejected request, with the `reason` label of the metric.
#[derive(Debug)]
pub(crate) struct AccessRejection {
    pub(crate) reason: &'static str,
    pub(crate) error: ApiError,
}

/// Checks API keys, JWTs and quotas. Its files are reloaded on change.
#[derive(Debug)]
pub(crate) struct AccessControl {
    file: Option<ReloadableFile<AccessFile, AccessConfigError>>,
    jwt: Option<(ReloadableFile<VerificationKeySet, JwksError>, JwtRequirements)>,
    admin_token: Option<SecretString>,
    /// Whether a client certificate is enough for the admin listener.
    admin_certificates: bool,
    quotas: QuotaTracker,
}

impl AccessControl {
    pub(crate) fn load(options: &AccessOptions, admin_certificates: bool) -> Result<Self, AccessFileError> {
        let load_keys = |path: &Path| {
            ReloadableFile::load(JWKS_FILE_FLAG, path, VerificationKeySet::read)
                .map_err(|source| AccessFileError::Jwks { path: path.to_owned(), source })
        };
        let load_access_file = |path: &Path| {
            ReloadableFile::load(ACCESS_FILE_FLAG, path, AccessFile::read)
                .map_err(|source| AccessFileError::Access { path: path.to_owned(), source })
        };
        let provider = match (options.jwks_file.as_deref(), options.token_rules()) {
            (Some(path), Some(rules)) => Some((load_keys(path)?, rules)),
            (Some(path), None) => return Err(AccessFileError::NoTokenRules(path.to_owned())),
            _ => None,
        };
        Ok(Self {
            file: options.access_file.as_deref().map(load_access_file).transpose()?,
            jwt: provider,
            admin_token: options.admin_token.clone(),
            admin_certificates,
            quotas: QuotaTracker::default(),
        })
    }

    /// Whether the public listener requires a key or token.
    pub(crate) fn requires_authentication(&self) -> bool {
        self.file.is_some() || self.jwt.is_some()
    }

    /// Required credentials of the public listener, for the log; `None` if it is open.
    pub(crate) fn describe(&self) -> Option<String> {
        let keys =
            self.file.as_ref().map(|loaded| format!("an API key ({} configured)", loaded.current().keys()));
        let tokens = self.jwt.as_ref().map(|(_, rules)| format!("a JWT of {}", rules.issuer));
        let credentials: Vec<String> = keys.into_iter().chain(tokens).collect();
        (!credentials.is_empty()).then(|| credentials.join(" or "))
    }

    /// Whether the admin listener requires a credential.
    pub(crate) fn admin_requires_authentication(&self) -> bool {
        self.file.is_some() || self.admin_token.is_some() || self.admin_certificates
    }

    /// Reloads the files when they change. `changes` must have been created before the files were read.
    pub(crate) async fn watch_files(self: Arc<Self>, changes: FileChangeWatcher, stop: CancellationToken) {
        let reload_files = || {
            if let Some(loaded) = &self.file {
                loaded.reload(AccessFile::keys);
            }
            if let Some((loaded, _)) = &self.jwt {
                loaded.reload(VerificationKeySet::len);
            }
        };
        changes.watch(stop, reload_files).await;
    }

    /// Authenticates a request at the public listener. `None` if authentication is off.
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

    /// Checks whether a request at the admin listener has `scope`. `certified`: the connection has a valid client certificate.
    pub(crate) fn authenticate_administrator(
        &self,
        headers: &HeaderMap,
        certified: bool,
        scope: AccessScope,
    ) -> Result<(), AccessRejection> {
        if !self.admin_requires_authentication() || (self.admin_certificates && certified) {
            return Ok(());
        }
        let presented = required_key(headers)?;
        if self
            .admin_token
            .as_ref()
            .is_some_and(|token| bool::from(token.expose().as_bytes().ct_eq(presented)))
        {
            return Ok(());
        }
        let caller = self.file.as_ref().and_then(|loaded| loaded.current().find(presented).cloned());
        match caller {
            Some(caller) if caller.has_scope(scope) => Ok(()),
            Some(_) => Err(forbidden(scope)),
            None => Err(invalid_key(
                "invalid token for the admin listener; send the --admin-token, or an API key with the scope `admin`",
            )),
        }
    }

    fn authenticate(&self, headers: &HeaderMap) -> Result<AuthenticatedCaller, AccessRejection> {
        let presented = required_key(headers)?;
        if let Some(caller) = self.file.as_ref().and_then(|loaded| loaded.current().find(presented).cloned())
        {
            return Ok(caller);
        }
        let Some((keys, rules)) = &self.jwt else {
            return Err(invalid_key("invalid API key; check it, or request a new one"));
        };
        keys.current().verify(presented, rules).map_err(|rejection| match rejection {
            JwtRejection::Invalid(reason) => invalid_key(&format!("invalid token: {reason}")),
            JwtRejection::MissingScope => forbidden(AccessScope::Inference),
        })
    }

    /// Counts a request of `caller` against its tenant's quota until the permit is dropped.
    pub(crate) fn admit(&self, caller: &AuthenticatedCaller) -> Result<Option<QuotaPermit>, AccessRejection> {
        let Some(loaded) = &self.file else { return Ok(None) };
        let file = loaded.current();
        self.quotas.try_admit(&caller.tenant, |name| file.quota(name), Instant::now()).map_err(
            |(kind, after)| {
                let (reason, limit_name) = match kind {
                    QuotaKind::Requests => ("requests_per_second", "requests per second"),
                    QuotaKind::InputTokens => ("input_tokens_per_second", "prompt tokens per second"),
                    QuotaKind::Concurrency => ("concurrent_requests", "concurrent requests"),
                };
                let text = format!(
                    "tenant {} has exceeded its quota of {limit_name}; retry after the time in Retry-After",
                    caller.tenant
                );
                let mut error = ApiError::new(ApiErrorCode::RateLimited, text);
                error.retry_after = Some(after);
                AccessRejection { reason, error }
            },
        )
    }
}

fn required_key(headers: &HeaderMap) -> Result<&[u8], AccessRejection> {
    presented_key(headers).map_err(|error| {
        let reason = match error {
            PresentedKeyError::Missing => "missing_key",
            PresentedKeyError::Conflicting => "conflicting_keys",
        };
        AccessRejection { reason, error: ApiError::new(ApiErrorCode::InvalidApiKey, error.to_string()) }
    })
}

fn invalid_key(text: &str) -> AccessRejection {
    AccessRejection { reason: "invalid_key", error: ApiError::new(ApiErrorCode::InvalidApiKey, text) }
}

fn forbidden(scope: AccessScope) -> AccessRejection {
    let text = format!("the key is valid but lacks the scope `{}`", scope.as_str());
    AccessRejection {
        reason: "insufficient_scope",
        error: ApiError::new(ApiErrorCode::InsufficientPermissions, text),
    }
}
