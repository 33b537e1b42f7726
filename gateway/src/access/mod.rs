//! Access control: API keys, JWTs, scopes and the quotas of tenants.

mod access_control;
mod caller;
mod file;
mod jwt;
mod options;
mod presented_key;
mod quota;

pub use access_control::AccessFileError;
pub(crate) use access_control::{AccessControl, AccessRejection};
pub(crate) use caller::{AccessScope, AuthenticatedCaller};
pub use file::{AccessConfigError, ApiKeyError, tenants_of_keys};
pub use jwt::{JwksError, tenant_of_token};
pub use options::AccessOptions;
pub(crate) use presented_key::API_KEY;
pub use quota::QuotaError;
pub(crate) use quota::QuotaPermit;
