//! Maps RBG roles to engine roles, and determines an engine's port from named ports.

use rbg_api::RoleKind;

use crate::topology::EngineRole;

/// Exact role names by engine role. With an empty list, a role is recognised by words in its name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoleNames {
    /// Default: names that contain `prefill`.
    pub prefill: Vec<String>,
    /// Default: names that contain `decode`.
    pub decode: Vec<String>,
    /// Default: names with the word `worker`, `plain` or `backend`.
    pub plain: Vec<String>,
}

impl RoleNames {
    /// The engine role of an RBG role; `None` for routers, stores and unknown roles.
    #[must_use]
    pub fn role(&self, name: &str) -> Option<EngineRole> {
        for (names, role) in [
            (&self.prefill, EngineRole::Prefill),
            (&self.decode, EngineRole::Decode),
            (&self.plain, EngineRole::Plain),
        ] {
            if names.iter().any(|exact| exact == name) {
                return Some(role);
            }
        }
        match RoleKind::from_role_name(name)? {
            RoleKind::Prefill => self.prefill.is_empty().then_some(EngineRole::Prefill),
            RoleKind::Decode => self.decode.is_empty().then_some(EngineRole::Decode),
            RoleKind::Plain => self.plain.is_empty().then_some(EngineRole::Plain),
            RoleKind::Store => None,
        }
    }
}

/// HTTP port by role, for engines without a listed port: RBG's file contains no container ports.
///
/// Default 8000: vLLM's default, and the port with which RBG's and Mooncake's examples start SGLang (whose own default is 30000).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RolePorts {
    pub prefill: u16,
    pub decode: u16,
    pub plain: u16,
}

impl Default for RolePorts {
    fn default() -> Self {
        Self { prefill: 8000, decode: 8000, plain: 8000 }
    }
}

impl RolePorts {
    pub(crate) fn of(self, role: EngineRole) -> u16 {
        match role {
            EngineRole::Prefill => self.prefill,
            EngineRole::Decode => self.decode,
            EngineRole::Plain => self.plain,
        }
    }
}

/// Port names in order of preference, without `-` and `_`.
const HTTP_NAMES: [&str; 7] = ["http", "api", "openai", "serving", "server", "service", "web"];

/// The engine's HTTP port among named ports, or the only port whose name indicates no other purpose.
pub(crate) fn http_port<'a>(ports: impl Iterator<Item = (&'a str, u16)> + Clone) -> Option<u16> {
    let plain_name = |name: &str| name.to_ascii_lowercase().replace(['-', '_'], "");
    for http_name in HTTP_NAMES {
        if let Some((_, port)) = ports.clone().find(|(name, _)| plain_name(name) == http_name) {
            return Some(port);
        }
    }
    if let Some((_, port)) = ports.clone().find(|(name, _)| plain_name(name).contains("http")) {
        return Some(port);
    }
    let other = ["bootstrap", "metric", "grpc", "dist", "nccl", "zmq", "event"];
    let mut rest = ports.filter(|(name, _)| !other.iter().any(|word| plain_name(name).contains(word)));
    match (rest.next(), rest.next()) {
        (Some((_, port)), None) => Some(port),
        _ => None,
    }
}

/// The bootstrap server's port among the named ports, if any.
pub(crate) fn bootstrap_port<'a>(mut ports: impl Iterator<Item = (&'a str, u16)>) -> Option<u16> {
    ports.find(|(name, _)| name.to_ascii_lowercase().contains("bootstrap")).map(|(_, port)| port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_names_of_the_known_examples_are_recognised() {
        let names = RoleNames::default();
        for (name, role) in [
            ("prefill", Some(EngineRole::Prefill)),
            ("decode", Some(EngineRole::Decode)),
            ("backend", Some(EngineRole::Plain)),
            ("mooncake-store", None),
            ("router", None),
        ] {
            assert_eq!(names.role(name), role, "{name}");
        }
    }

    #[test]
    fn exact_names_replace_the_rule_of_their_role_only() {
        let names = RoleNames { prefill: vec!["p".into(), "prefill-router".into()], ..RoleNames::default() };
        assert_eq!(names.role("p"), Some(EngineRole::Prefill));
        assert_eq!(names.role("prefill-router"), Some(EngineRole::Prefill), "an exact name");
        assert_eq!(names.role("prefill"), None);
        assert_eq!(names.role("decode"), Some(EngineRole::Decode));
    }

    #[test]
    fn ports_by_name() {
        let http = |ports: &[(&str, u16)]| http_port(ports.iter().copied());
        assert_eq!(http(&[("metrics", 1), ("h_ttp", 2), ("web", 3)]), Some(2));
        assert_eq!(http(&[("api_http", 1), ("bootstrap", 2)]), Some(1));
        assert_eq!(http(&[("port8000", 8000), ("bootstrap", 2)]), Some(8000));
        assert_eq!(http(&[("a", 1), ("b", 2)]), None, "ambiguous");
        assert_eq!(http(&[]), None);
        assert_eq!(bootstrap_port([("http", 1), ("bootstrap_port", 2)].into_iter()), Some(2));
    }
}
