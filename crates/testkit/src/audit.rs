//! Audit log of service accounts' API requests.

use std::io;
use std::path::Path;

use serde::Deserialize;

/// Logs requests of service accounts once each, without request content.
pub(crate) const POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ['system:serviceaccounts']}
- {level: None}
";

/// One audited API request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEvent {
    stage: String,
    /// Account that sent the request.
    pub user: AuditUser,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, …
    pub verb: String,
    /// Request URI, path and query.
    #[serde(rename = "requestURI")]
    pub uri: String,
    /// The object named by the path, if any.
    #[serde(default)]
    pub object_ref: Option<AuditObjectRef>,
    /// Status of the response.
    #[serde(default)]
    pub response_status: Option<AuditResponseStatus>,
}

/// Account that sent a request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditUser {
    /// Account name in the form `system:serviceaccount:NAMESPACE:NAME`.
    pub username: String,
}

/// An object as named by a path; missing parts are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuditObjectRef {
    /// API group; empty for the core group.
    pub api_group: String,
    /// Resource type, such as `pods`.
    pub resource: String,
    /// Subresource, such as `status`.
    pub subresource: String,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

/// Status of a response.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditResponseStatus {
    /// HTTP status code of the response.
    #[serde(default)]
    pub code: u16,
    /// Reason of an error response.
    #[serde(default)]
    pub message: String,
}

impl AuditEvent {
    /// HTTP status of the response; 0 if none was logged.
    #[must_use]
    pub fn code(&self) -> u16 {
        self.response_status.as_ref().map_or(0, |response| response.code)
    }

    /// Whether it was rejected for a missing permission. An API server that temporarily cannot resolve an owner's kind, which it looks up
    /// with a request to itself, returns the same code.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        let response = self.response_status.as_ref().filter(|response| response.code == 403);
        response.is_some_and(|response| !response.message.contains("cannot find RESTMapping"))
    }
}

/// All requests in this log, once each: a watch at its start, other requests at their response.
pub(crate) fn read(path: &Path) -> io::Result<Vec<AuditEvent>> {
    let text = std::fs::read_to_string(path)?;
    // The last line may be incomplete.
    let all = text.lines().filter_map(|line| serde_json::from_str::<AuditEvent>(line).ok());
    Ok(all.filter(|event| (event.verb == "watch") == (event.stage == "ResponseStarted")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_count_at_start_and_other_requests_at_end() {
        let line = |stage: &str, verb: &str| {
            format!(
                r#"{{"stage":"{stage}","verb":"{verb}","user":{{"username":"u"}},"requestURI":"/","objectRef":{{"resource":"pods"}},"responseStatus":{{"code":200}}}}"#
            )
        };
        let lines = [
            line("ResponseStarted", "watch"),
            line("ResponseComplete", "watch"),
            line("ResponseComplete", "get"),
            "{\"stage\":".to_owned(),
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines.join("\n")).unwrap();
        let events = read(file.path()).unwrap();
        assert_eq!(events.iter().map(|event| event.verb.as_str()).collect::<Vec<_>>(), ["watch", "get"]);
        assert_eq!(
            (events[1].code(), events[1].object_ref.as_ref().unwrap().resource.as_str()),
            (200, "pods")
        );
    }

    #[test]
    fn an_unresolved_owner_kind_is_not_a_missing_permission() {
        let forbidden = |code: u16, message: &str| {
            let event = format!(
                r#"{{"stage":"ResponseComplete","verb":"patch","user":{{"username":"u"}},"requestURI":"/","responseStatus":{{"code":{code},"message":"{message}"}}}}"#
            );
            serde_json::from_str::<AuditEvent>(&event).unwrap().is_denied()
        };
        assert!(forbidden(403, "services is forbidden: User cannot patch resource"));
        assert!(forbidden(
            403,
            "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on"
        ));
        assert!(!forbidden(
            403,
            "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion a/v1 Kind B"
        ));
        assert!(!forbidden(200, ""));
    }
}
