//! Which of an instance's possible host names exists.
//!
//! The file of every release so far lists `<instance>.<service>` for all roles, but the pods of leader-worker and
//! custom-component roles are named `<instance>-<n>`, and nothing in the file tells such a role. DNS does. It also tells the addresses
//! under which others know the members that are no engines.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt};

use super::RbgMember;

/// For one look-up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Look-ups at the same time.
const MAX_CONCURRENT_LOOKUPS: usize = 16;

/// Answers the addresses of a host; none if its name does not exist.
pub(crate) type HostResolver = Arc<dyn Fn(String) -> BoxFuture<'static, Vec<IpAddr>> + Send + Sync>;

pub(crate) fn system_resolver() -> HostResolver {
    Arc::new(|host| {
        Box::pin(async move {
            let lookup = tokio::net::lookup_host((host, 0));
            match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
                Ok(Ok(found)) => found.map(|address| address.ip()).collect(),
                _ => Vec::new(),
            }
        })
    })
}

/// What DNS told, by the ids of members.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ResolvedNames {
    /// Whether they are reached under their alternative name.
    alternative: BTreeMap<String, bool>,
    /// Addresses of what is no engine.
    addresses: BTreeMap<String, Vec<IpAddr>>,
}

impl ResolvedNames {
    pub(crate) fn chosen<'a>(&self, member: &'a RbgMember) -> &'a str {
        match &member.alternative {
            Some(host) if self.alternative.get(&member.id) == Some(&true) => host,
            _ => &member.host,
        }
    }

    /// Names and addresses of a member that is no engine.
    pub(crate) fn all(&self, member: &RbgMember) -> Vec<String> {
        let pod = member.host.split('.').next().unwrap_or_default();
        let addresses = self.addresses.get(&member.id).into_iter().flatten();
        [pod.to_owned(), member.host.clone()].into_iter().chain(addresses.map(IpAddr::to_string)).collect()
    }

    /// Looks again. A name in use stays while it exists, and while neither exists: pods come and go.
    pub(crate) async fn resolve(&mut self, members: &[RbgMember], resolve: &HostResolver) {
        let (engines, others): (Vec<_>, Vec<_>) = members.iter().partition(|member| member.role.is_some());
        let mut found = Vec::new();
        for member in others {
            let (id, addresses) = (member.id.clone(), resolve(member.host.clone()));
            found.push(async move { (id, addresses.await) });
        }
        self.addresses = stream::iter(found).buffer_unordered(MAX_CONCURRENT_LOOKUPS).collect().await;
        let mut lookups = Vec::new();
        for member in engines {
            let Some(alternative) = member.alternative.clone() else { continue };
            let uses_alternative = self.alternative.get(&member.id).copied().unwrap_or(false);
            let (current, other) = if uses_alternative {
                (alternative, member.host.clone())
            } else {
                (member.host.clone(), alternative)
            };
            lookups.push(choose_name(member.id.clone(), uses_alternative, current, other, resolve.clone()));
        }
        self.alternative = stream::iter(lookups).buffer_unordered(MAX_CONCURRENT_LOOKUPS).collect().await;
    }
}

async fn choose_name(
    id: String,
    uses_alternative: bool,
    current: String,
    other: String,
    resolve: HostResolver,
) -> (String, bool) {
    let switch = resolve(current).await.is_empty() && !resolve(other).await.is_empty();
    (id, uses_alternative != switch)
}
