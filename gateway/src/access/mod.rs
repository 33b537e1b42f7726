//! Who may ask, for what, and how much: API keys and signed tokens, scopes, and the quotas of tenants.

mod bounded;
mod caller;
mod file;
mod gate;
mod quota;
mod signed;

pub(crate) use caller::{Caller, Scope};
pub use file::tenants_of_keys;
pub use gate::AccessError;
pub(crate) use gate::{Gate, Refusal};
pub(crate) use quota::Permit;
pub use signed::tenant_of_token;
