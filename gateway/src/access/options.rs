//! Settings of authentication.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moongate_runtime::SecretString;

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
