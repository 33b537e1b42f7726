//! Where requests come in: who asks, and whether that is allowed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use moongate_runtime::{FileChanges, Secret};
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

use super::caller::{Caller, Scope};
use super::file::AccessFile;
use super::quota::{Bound, Permit, Quotas};
use super::signed::{KeySet, Unfit};
use crate::config::{AccessOptions, TokenRules};
use crate::error::{ApiError, Code};

/// A file that decides who may ask cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {}: {problem}", path.display())]
pub struct AccessError {
    flag: &'static str,
    path: PathBuf,
    problem: String,
}

/// A request that is not let in, and why, in one word for the metrics.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) reason: &'static str,
    pub(crate) error: ApiError,
}

/// What was read from a file, and what is read from it later.
struct Held<T> {
    flag: &'static str,
    path: PathBuf,
    read: fn(&std::path::Path) -> Result<T, String>,
    now: ArcSwap<T>,
}

impl<T> Held<T> {
    fn load(
        flag: &'static str,
        path: &std::path::Path,
        read: fn(&std::path::Path) -> Result<T, String>,
    ) -> Result<Self, AccessError> {
        let wrong = |problem| AccessError { flag, path: path.to_owned(), problem };
        let now = ArcSwap::from_pointee(read(path).map_err(wrong)?);
        Ok(Self { flag, path: path.to_owned(), read, now })
    }

    /// Reads the file again. What is wrong changes nothing, so that a slip of the hand shuts nobody out.
    fn reload(&self, describe: impl Fn(&T) -> usize) {
        let (flag, file) = (self.flag, self.path.display());
        match (self.read)(&self.path) {
            Ok(value) => {
                tracing::info!(flag, %file, keys = describe(&value), "read again");
                self.now.store(Arc::new(value));
            }
            Err(problem) => {
                tracing::warn!(flag, %file, problem, "cannot be used; what was read before stays in force");
            }
        }
    }
}

impl<T> std::fmt::Debug for Held<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Knows keys, tokens and quotas. What its files say is renewed while it is used.
#[derive(Debug)]
pub(crate) struct Gate {
    file: Option<Held<AccessFile>>,
    provider: Option<(Held<KeySet>, TokenRules)>,
    admin_token: Option<Secret>,
    /// Whether a client's certificate opens the admin listener.
    admin_certificates: bool,
    quotas: Quotas,
}

impl Gate {
    pub(crate) fn load(options: &AccessOptions, admin_certificates: bool) -> Result<Self, AccessError> {
        let file = options.access_file.as_deref();
        let provider = match (options.jwks_file.as_deref(), options.token_rules()) {
            (Some(path), Some(rules)) => Some((Held::load("--jwks-file", path, KeySet::read)?, rules)),
            (Some(path), None) => {
                let problem =
                    "--jwt-issuer and --jwt-audience are needed too, or tokens for others would be taken"
                        .to_owned();
                return Err(AccessError { flag: "--jwks-file", path: path.to_owned(), problem });
            }
            _ => None,
        };
        Ok(Self {
            file: file.map(|path| Held::load("--access-file", path, AccessFile::read)).transpose()?,
            provider,
            admin_token: options.admin_token.clone(),
            admin_certificates,
            quotas: Quotas::default(),
        })
    }

    /// Whether clients are asked who they are.
    pub(crate) fn is_closed(&self) -> bool {
        self.file.is_some() || self.provider.is_some()
    }

    /// What clients are asked for, in words; `None`: nothing.
    pub(crate) fn describe(&self) -> Option<String> {
        let keys = self.file.as_ref().map(|held| format!("an API key ({} known)", held.now.load().keys()));
        let tokens = self.provider.as_ref().map(|(_, rules)| format!("a token of {}", rules.issuer));
        let asked: Vec<String> = keys.into_iter().chain(tokens).collect();
        (!asked.is_empty()).then(|| asked.join(" or "))
    }

    /// Whether the admin listener asks.
    pub(crate) fn is_admin_closed(&self) -> bool {
        self.file.is_some() || self.admin_token.is_some() || self.admin_certificates
    }

    /// Reads files again when they change. `changes` must be older than what was read.
    pub(crate) async fn keep_current(self: Arc<Self>, changes: FileChanges, stop: CancellationToken) {
        let renewed = || {
            if let Some(held) = &self.file {
                held.reload(AccessFile::keys);
            }
            if let Some((held, _)) = &self.provider {
                held.reload(KeySet::len);
            }
        };
        changes.follow(stop, renewed).await;
    }

    /// Who asks at the public listener. `None`: nobody is asked.
    pub(crate) fn client(&self, headers: &HeaderMap) -> Result<Option<Caller>, Refusal> {
        if !self.is_closed() {
            return Ok(None);
        }
        let caller = self.recognise(headers)?;
        if !caller.may(Scope::Inference) {
            return Err(forbidden(Scope::Inference));
        }
        Ok(Some(caller))
    }

    /// Whether whoever sends these headers may do what needs `scope` at the admin listener; `certified`: it has shown a certificate.
    pub(crate) fn administrator(
        &self,
        headers: &HeaderMap,
        certified: bool,
        scope: Scope,
    ) -> Result<(), Refusal> {
        if !self.is_admin_closed() || (self.admin_certificates && certified) {
            return Ok(());
        }
        let given = bearer(headers)?;
        if self.admin_token.as_ref().is_some_and(|token| bool::from(token.expose().as_bytes().ct_eq(given))) {
            return Ok(());
        }
        let caller = self.file.as_ref().and_then(|held| held.now.load().find(given).cloned());
        match caller {
            Some(caller) if caller.may(scope) => Ok(()),
            Some(_) => Err(forbidden(scope)),
            None => Err(wrong(
                "the admin listener does not know this token; it wants --admin-token, or a key with the scope `admin`",
            )),
        }
    }

    fn recognise(&self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        let given = bearer(headers)?;
        if let Some(caller) = self.file.as_ref().and_then(|held| held.now.load().find(given).cloned()) {
            return Ok(caller);
        }
        let Some((keys, rules)) = &self.provider else {
            return Err(wrong("the API key is not known; check it, or ask for one"));
        };
        keys.now.load().verify(given, rules).map_err(|unfit| match unfit {
            Unfit::Wrong(reason) => wrong(&format!("the token is not accepted: {reason}")),
            Unfit::Scope => forbidden(Scope::Inference),
        })
    }

    /// Counts a request of `caller` against its tenant's quota, until the permit is dropped.
    pub(crate) fn admit(&self, caller: &Caller) -> Result<Option<Permit>, Refusal> {
        let Some(held) = &self.file else { return Ok(None) };
        let file = held.now.load();
        self.quotas.enter(&caller.tenant, |name| file.quota(name), Instant::now()).map_err(
            |(bound, after)| {
                let (reason, what) = match bound {
                    Bound::Requests => ("requests_per_second", "requests per second"),
                    Bound::InputTokens => ("input_tokens_per_second", "prompt tokens per second"),
                    Bound::Concurrency => ("concurrent_requests", "requests at once"),
                };
                let text =
                    format!("{} has used its {what}; ask again after the time in Retry-After", caller.tenant);
                let mut error = ApiError::new(Code::RateLimited, text);
                error.retry_after = Some(after);
                Refusal { reason, error }
            },
        )
    }
}

fn bearer(headers: &HeaderMap) -> Result<&[u8], Refusal> {
    const SCHEME: &[u8] = b"bearer ";
    let given = headers.get(AUTHORIZATION).map(http::HeaderValue::as_bytes);
    let given = given.and_then(|value| {
        let (scheme, rest) = value.split_at_checked(SCHEME.len())?;
        scheme.eq_ignore_ascii_case(SCHEME).then_some(rest.trim_ascii())
    });
    given.filter(|given| !given.is_empty()).ok_or_else(|| {
        let text = "no API key was sent; send it as `authorization: Bearer KEY`";
        Refusal { reason: "missing_key", error: ApiError::new(Code::InvalidApiKey, text) }
    })
}

fn wrong(text: &str) -> Refusal {
    Refusal { reason: "wrong_key", error: ApiError::new(Code::InvalidApiKey, text) }
}

fn forbidden(scope: Scope) -> Refusal {
    let text = format!("the key is known, but not for this: it lacks the scope `{}`", scope.as_str());
    Refusal { reason: "wrong_scope", error: ApiError::new(Code::InsufficientPermissions, text) }
}
