//! Access control: API keys, JWTs, scopes and the quotas of tenants.

mod access_control;
mod bounded;
mod caller;
mod file;
mod jwt;
mod options;
mod quota;

pub use access_control::AccessFileError;
pub(crate) use access_control::{AccessControl, AccessRejection};
pub(crate) use caller::{AccessScope, AuthenticatedCaller};
pub use file::tenants_of_keys;
pub use jwt::tenant_of_token;
pub use options::AccessOptions;
pub(crate) use quota::QuotaPermit;
