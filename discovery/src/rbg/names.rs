//! Which of an instance's possible host names exists.
//!
//! The file of every release so far lists `<instance>.<service>` for all roles, but the pods of leader-worker and
//! custom-component roles are named `<instance>-<n>`, and nothing in the file tells such a role. DNS does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt};

use super::Member;

/// For one look-up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Look-ups at the same time.
const LOOKUPS: usize = 16;

/// Answers whether a host name exists.
pub(crate) type Resolve = Arc<dyn Fn(String) -> BoxFuture<'static, bool> + Send + Sync>;

pub(crate) fn system_resolver() -> Resolve {
    Arc::new(|host| {
        Box::pin(async move {
            let lookup = tokio::net::lookup_host((host, 0));
            match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
                Ok(Ok(mut found)) => found.next().is_some(),
                _ => false,
            }
        })
    })
}

/// Ids of the members that are reached under their alternative name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    alternative: BTreeMap<String, bool>,
}

impl Names {
    pub(crate) fn chosen<'a>(&self, member: &'a Member) -> &'a str {
        match &member.alternative {
            Some(host) if self.alternative.get(&member.id) == Some(&true) => host,
            _ => &member.host,
        }
    }

    /// Looks again. A name in use stays while it exists, and while neither exists: pods come and go.
    pub(crate) async fn look(&mut self, members: &[Member], resolve: &Resolve) {
        let mut lookups = Vec::new();
        for member in members {
            let Some(alternative) = member.alternative.clone() else { continue };
            let uses_alternative = self.alternative.get(&member.id).copied().unwrap_or(false);
            let (current, other) = if uses_alternative {
                (alternative, member.host.clone())
            } else {
                (member.host.clone(), alternative)
            };
            lookups.push(which(member.id.clone(), uses_alternative, current, other, resolve.clone()));
        }
        self.alternative = stream::iter(lookups).buffer_unordered(LOOKUPS).collect().await;
    }
}

async fn which(
    id: String,
    uses_alternative: bool,
    current: String,
    other: String,
    resolve: Resolve,
) -> (String, bool) {
    let switch = !resolve(current).await && resolve(other).await;
    (id, uses_alternative != switch)
}
