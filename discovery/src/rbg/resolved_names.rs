//! Resolves which of an instance's possible host names exists.
//!
//! RBG's discovery file lists `<instance>.<service>` for all roles, but the pods of leader-worker and custom-component roles are named
//! `<instance>-<n>`, and the file does not mark such roles. DNS shows which name exists. It also supplies the addresses of members
//! without an engine, such as store nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt};

use super::RbgMember;

/// Time limit for one DNS lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent lookups.
const MAX_CONCURRENT_LOOKUPS: usize = 16;

/// Returns the addresses of a host; empty if its name does not exist.
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

/// Results of DNS lookups, by the ids of members.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ResolvedNames {
    /// Whether an engine is reached under its alternative name.
    alternative: BTreeMap<String, bool>,
    /// Addresses of members without an engine.
    addresses: BTreeMap<String, Vec<IpAddr>>,
}

impl ResolvedNames {
    pub(crate) fn chosen<'a>(&self, member: &'a RbgMember) -> &'a str {
        match &member.alternative {
            Some(host) if self.alternative.get(&member.id) == Some(&true) => host,
            _ => &member.host,
        }
    }

    /// Names and addresses of a member without an engine.
    pub(crate) fn all(&self, member: &RbgMember) -> Vec<String> {
        let pod = member.host.split('.').next().unwrap_or_default();
        let addresses = self.addresses.get(&member.id).into_iter().flatten();
        [pod.to_owned(), member.host.clone()].into_iter().chain(addresses.map(IpAddr::to_string)).collect()
    }

    /// Repeats all lookups. The name in use is kept while it exists, and while neither name exists, as during a pod's restart.
    pub(crate) async fn resolve(&mut self, members: &[RbgMember], resolve: &HostResolver) {
        let (engines, others): (Vec<_>, Vec<_>) = members.iter().partition(|member| member.role.is_some());
        let mut address_lookups = Vec::new();
        for member in others {
            let (id, addresses) = (member.id.clone(), resolve(member.host.clone()));
            address_lookups.push(async move { (id, addresses.await) });
        }
        self.addresses =
            stream::iter(address_lookups).buffer_unordered(MAX_CONCURRENT_LOOKUPS).collect().await;
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
