//! Settings about who may ask.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use moongate_runtime::SecretString;

use crate::ingress::{CorsOrigin, InferencePath};

/// Paths of the admin listener that may be open to everybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UnauthenticatedPath {
    /// `/health`
    Health,
    /// `/ready`
    Ready,
    /// `/metrics`
    Metrics,
    /// Nothing at all.
    None,
}

/// Who may ask, at which listener.
#[derive(Debug, Clone, Args)]
pub struct AccessOptions {
    /// TOML file with API keys, whose they are, and the quotas of tenants; re-read when it changes. With it, clients need a key, and the
    /// admin listener one with the scope `admin`.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ACCESS_FILE")]
    pub access_file: Option<PathBuf>,

    /// Public keys (JWKS) of an identity provider whose signed tokens (JWT) are taken like API keys; re-read when it changes. Needs
    /// --jwt-issuer and --jwt-audience.
    #[arg(long, value_name = "FILE", env = "MOONGATE_JWKS_FILE")]
    pub jwks_file: Option<PathBuf>,

    /// What the claim `iss` of such a token must be.
    #[arg(long, value_name = "TEXT", env = "MOONGATE_JWT_ISSUER")]
    pub jwt_issuer: Option<String>,

    /// What the claim `aud` of such a token must have. Repeatable: any of them will do.
    #[arg(long, value_name = "TEXT", env = "MOONGATE_JWT_AUDIENCE", value_delimiter = ' ')]
    pub jwt_audience: Vec<String>,

    /// Claim of such a token that names the tenant.
    #[arg(long, value_name = "CLAIM", env = "MOONGATE_JWT_TENANT_CLAIM", default_value = "sub")]
    pub jwt_tenant_claim: String,

    /// What the claim `scope` of such a token must have; default: nothing.
    #[arg(long, value_name = "SCOPE", env = "MOONGATE_JWT_SCOPE")]
    pub jwt_scope: Option<String>,

    /// By how much clocks may differ when such a token's times are checked.
    #[arg(long, value_name = "TIME", env = "MOONGATE_JWT_LEEWAY", default_value = "60s", value_parser = humantime::parse_duration)]
    pub jwt_leeway: Duration,

    /// Token that the admin listener asks for, as `Authorization: Bearer TOKEN`.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_ADMIN_TOKEN", hide_env_values = true)]
    pub admin_token: Option<SecretString>,

    /// Origin whose pages may send requests to the clients' listener (CORS), such as `https://chat.example`; `*`: all. Repeatable. Default: none, so that
    /// no page in a browser can use what the browser's machine reaches.
    #[arg(long, value_name = "ORIGIN", env = "MOONGATE_CORS_ORIGIN", value_delimiter = ' ')]
    pub cors_origin: Vec<CorsOrigin>,

    /// Further path of engines that clients reach, such as /invocations; /* at its end: everything below. Repeatable. Paths that administer
    /// engines are refused. Default: none beside the inference paths of vLLM and SGLang.
    #[arg(long, value_name = "PATH", env = "MOONGATE_INFERENCE_PATH", value_delimiter = ' ')]
    pub inference_path: Vec<InferencePath>,

    /// What of a protected admin listener is open to everybody: health, ready, metrics, none. Default: what a kubelet asks.
    #[arg(
        long,
        value_name = "PATHS",
        env = "MOONGATE_ADMIN_OPEN",
        value_enum,
        value_delimiter = ',',
        default_value = "health,ready",
        hide_possible_values = true
    )]
    pub admin_open: Vec<UnauthenticatedPath>,
}

/// What a signed token must say.
#[derive(Debug, Clone)]
pub(crate) struct JwtRequirements {
    pub(crate) issuer: String,
    pub(crate) audience: Vec<String>,
    pub(crate) tenant_claim: String,
    pub(crate) scope: Option<String>,
    pub(crate) leeway: Duration,
}

impl AccessOptions {
    /// The files that are read again when they change.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        [&self.access_file, &self.jwks_file].into_iter().flatten().cloned().collect()
    }

    /// `None` without an issuer or an audience.
    pub(crate) fn token_rules(&self) -> Option<JwtRequirements> {
        let issuer = self.jwt_issuer.clone().filter(|issuer| !issuer.is_empty())?;
        (!self.jwt_audience.is_empty()).then(|| JwtRequirements {
            issuer,
            audience: self.jwt_audience.clone(),
            tenant_claim: self.jwt_tenant_claim.clone(),
            scope: self.jwt_scope.clone(),
            leeway: self.jwt_leeway,
        })
    }
}
