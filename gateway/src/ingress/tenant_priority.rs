//! Tenant and priority of a request, which determine its order in the queue.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use http::{HeaderMap, HeaderName, HeaderValue};
use moongate_scheduler::{BACKGROUND_PRIORITY, RequestProfile};

use crate::access::AuthenticatedCaller;

/// Names of the headers to read.
#[derive(Debug, Clone, Default)]
pub(crate) struct TenantPriorityHeaders {
    pub(crate) tenant: Option<HeaderName>,
    pub(crate) priority: Option<HeaderName>,
}

/// Priority of a request of the gateway itself, in the extensions of the request; replaces that of a header.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestPriority(pub(super) i32);

impl RequestPriority {
    /// Below that of every client.
    pub(super) const LOWEST: Self = Self(BACKGROUND_PRIORITY);
}

impl TenantPriorityHeaders {
    /// Hash of the tenant's name. An authenticated client belongs to its key's tenant, whatever its headers.
    pub(super) fn tenant(&self, headers: &HeaderMap, caller: Option<&AuthenticatedCaller>) -> Option<u64> {
        match caller {
            Some(caller) => Some(hash(caller.tenant.as_bytes())),
            None => headers_value(headers, self.tenant.as_ref()).map(|name| hash(name.as_bytes())),
        }
    }

    /// Sets tenant and priority from the client's key and headers.
    pub(super) fn apply(
        &self,
        headers: &HeaderMap,
        caller: Option<&AuthenticatedCaller>,
        request: RequestProfile,
    ) -> RequestProfile {
        let tenant = self.tenant(headers, caller);
        let priority = headers_value(headers, self.priority.as_ref())
            .and_then(|text| text.to_str().ok()?.trim().parse().ok());
        // Clients are protected from background requests, and cannot be ones.
        let priority = priority.map_or(0, |priority: i32| priority.max(BACKGROUND_PRIORITY + 1));
        RequestProfile { tenant, priority, ..request }
    }
}

fn headers_value<'a>(headers: &'a HeaderMap, name: Option<&HeaderName>) -> Option<&'a HeaderValue> {
    headers.get(name?)
}

fn hash(name: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::ModelIndex;

    use super::*;

    fn tenant_and_priority(
        names: &TenantPriorityHeaders,
        headers: &[(&'static str, &'static str)],
    ) -> (Option<u64>, i32) {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let request = RequestProfile {
            model: ModelIndex(0),
            input_tokens: 1,
            max_output_tokens: Some(1),
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        };
        let request = names.apply(&headers.collect(), None, request);
        (request.tenant, request.priority)
    }

    #[test]
    fn tenant_and_priority_come_from_configured_headers() {
        let headers = [("authorization", "Bearer a"), ("x-priority", " 3 ")];
        assert_eq!(tenant_and_priority(&TenantPriorityHeaders::default(), &headers), (None, 0));
        let names = TenantPriorityHeaders {
            tenant: Some(HeaderName::from_static("authorization")),
            priority: Some(HeaderName::from_static("x-priority")),
        };
        let (tenant, priority) = tenant_and_priority(&names, &headers);
        assert!(tenant.is_some());
        assert_eq!(priority, 3);
        assert_ne!(tenant_and_priority(&names, &[("authorization", "Bearer b")]).0, tenant);
        assert_eq!(tenant_and_priority(&names, &[("x-priority", "high")]), (None, 0));
    }
}
