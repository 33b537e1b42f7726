//! What service accounts have asked an API server for.

use std::io;
use std::path::Path;

use serde::Deserialize;

/// Only service accounts, once each, and nothing of what was in requests.
pub(crate) const POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ['system:serviceaccounts']}
- {level: None}
";

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEvent {
    stage: String,
    /// Who.
    pub user: AuditUser,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, …
    pub verb: String,
    /// What it asked for, path and query.
    #[serde(rename = "requestURI")]
    pub uri: String,
    /// The object, unless the path names none.
    #[serde(default)]
    pub object_ref: Option<AuditObjectRef>,
    /// How it was answered.
    #[serde(default)]
    pub response_status: Option<AuditResponseStatus>,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditUser {
    /// `system:serviceaccount:NAMESPACE:NAME`.
    pub username: String,
}

/// An object as a path names it; what is not named is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuditObjectRef {
    /// Its group; empty for the core group.
    pub api_group: String,
    /// `pods`, …
    pub resource: String,
    /// `status`, …
    pub subresource: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditResponseStatus {
    /// As in HTTP.
    #[serde(default)]
    pub code: u16,
    /// Why, if it is a refusal.
    #[serde(default)]
    pub message: String,
}

impl AuditEvent {
    /// Status of the answer.
    #[must_use]
    pub fn code(&self) -> u16 {
        self.response_status.as_ref().map_or(0, |answer| answer.code)
    }

    /// Whether it was refused for want of a permission. That an API server does not find an owner's kind for a moment, which it looks up by
    /// asking itself, is a refusal of the same code.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        let answer = self.response_status.as_ref().filter(|answer| answer.code == 403);
        answer.is_some_and(|answer| !answer.message.contains("cannot find RESTMapping"))
    }
}

/// All requests in this log, each once: a watch when it begins, anything else when it is answered.
pub(crate) fn read(path: &Path) -> io::Result<Vec<AuditEvent>> {
    let text = std::fs::read_to_string(path)?;
    // The last line may not be whole yet.
    let all = text.lines().filter_map(|line| serde_json::from_str::<AuditEvent>(line).ok());
    Ok(all.filter(|asked| (asked.verb == "watch") == (asked.stage == "ResponseStarted")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_counts_when_it_begins_and_the_rest_when_it_ends() {
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
        let asked = read(file.path()).unwrap();
        assert_eq!(asked.iter().map(|one| one.verb.as_str()).collect::<Vec<_>>(), ["watch", "get"]);
        assert_eq!((asked[1].code(), asked[1].object_ref.as_ref().unwrap().resource.as_str()), (200, "pods"));
    }

    #[test]
    fn an_owners_kind_that_is_not_found_is_no_missing_permission() {
        let forbidden = |code: u16, message: &str| {
            let asked = format!(
                r#"{{"stage":"ResponseComplete","verb":"patch","user":{{"username":"u"}},"requestURI":"/","responseStatus":{{"code":{code},"message":"{message}"}}}}"#
            );
            serde_json::from_str::<AuditEvent>(&asked).unwrap().is_denied()
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
