//! Settings of authentication and authorization.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use moongate_runtime::SecretString;

use crate::ingress::{CorsOrigin, InferencePath};

/// Paths of the admin listener that may be open without authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UnauthenticatedPath {
    /// `/health`
    Health,
    /// `/ready`
    Ready,
    /// `/metrics`
    Metrics,
    /// No path at all.
    None,
}

/// Authentication at both listeners.
#[derive(Debug, Clone, Args)]
pub struct AccessOptions {
    /// TOML file with API keys, their tenants, and the tenants' quotas; reloaded on change. With it, clients need a key, and the
    /// admin listener requires one with the scope `admin`.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ACCESS_FILE")]
    pub access_file: Option<PathBuf>,

    /// Public keys (JWKS) of an identity provider whose JWTs are accepted like API keys; reloaded on change. Requires --jwt-issuer
    /// and --jwt-audience.
    #[arg(long, value_name = "FILE", env = "MOONGATE_JWKS_FILE")]
    pub jwks_file: Option<PathBuf>,

    /// Required claim `iss` of a JWT.
    #[arg(long, value_name = "TEXT", env = "MOONGATE_JWT_ISSUER")]
    pub jwt_issuer: Option<String>,

    /// Accepted claim `aud` of a JWT. Repeatable: one match is enough.
    #[arg(long, value_name = "TEXT", env = "MOONGATE_JWT_AUDIENCE", value_delimiter = ' ')]
    pub jwt_audience: Vec<String>,

    /// JWT claim that names the tenant.
    #[arg(long, value_name = "CLAIM", env = "MOONGATE_JWT_TENANT_CLAIM", default_value = "sub")]
    pub jwt_tenant_claim: String,

    /// Scope required in a JWT's claim `scope` or `scp`. Default: none.
    #[arg(long, value_name = "SCOPE", env = "MOONGATE_JWT_SCOPE")]
    pub jwt_scope: Option<String>,

    /// Accepted clock difference when a JWT's times are checked.
    #[arg(long, value_name = "TIME", env = "MOONGATE_JWT_LEEWAY", default_value = "60s", value_parser = humantime::parse_duration)]
    pub jwt_leeway: Duration,

    /// Token that the admin listener requires, as `Authorization: Bearer TOKEN`.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_ADMIN_TOKEN", hide_env_values = true)]
    pub admin_token: Option<SecretString>,

    /// Origin whose pages may send requests to the public listener (CORS), such as `https://chat.example`; `*`: all. Repeatable.
    /// Default: none, so that no web page can reach the gateway through a visitor's browser.
    #[arg(long, value_name = "ORIGIN", env = "MOONGATE_CORS_ORIGIN", value_delimiter = ' ')]
    pub cors_origin: Vec<CorsOrigin>,

    /// Additional engine path open to clients, such as /invocations; a trailing /* includes everything below it. Repeatable. Paths
    /// that administer engines are rejected. Default: none besides the inference paths of vLLM and SGLang.
    #[arg(long, value_name = "PATH", env = "MOONGATE_INFERENCE_PATH", value_delimiter = ' ')]
    pub inference_path: Vec<InferencePath>,

    /// Paths of a protected admin listener that need no authentication: health, ready, metrics, none. Default: the paths that a
    /// kubelet probes.
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

/// Claims that a JWT must have.
#[derive(Debug, Clone)]
pub(crate) struct JwtRequirements {
    pub(crate) issuer: String,
    pub(crate) audience: Vec<String>,
    pub(crate) tenant_claim: String,
    pub(crate) scope: Option<String>,
    pub(crate) leeway: Duration,
}

impl AccessOptions {
    /// Files that are reloaded on change.
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
