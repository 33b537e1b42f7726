//! Engine paths that are open to clients. Denied by default: an engine's other paths load adapters, flush caches and put it to
//! sleep.

use std::str::FromStr;

use super::request_target::canonical_path;

/// Inference paths of vLLM 0.32 and SGLang 0.5.23 that are passed through to one engine. All of them are POSTed to.
pub(super) const INFERENCE_PATHS: [&str; 30] = [
    "/classify",
    "/cohere/v2/chat",
    "/detokenize",
    "/encode",
    "/generative_scoring",
    "/parse_function_call",
    "/pooling",
    "/rerank",
    "/score",
    "/separate_reasoning",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/classify",
    "/v1/decisions",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/images/variations",
    "/v1/messages/count_tokens",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/systemone",
    "/v1/tokenize",
    "/v2/embed",
    "/v2/rerank",
];

/// Inference paths that accept a form with a file, besides JSON.
const FORM_PATHS: [&str; 4] =
    ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations"];

/// Inference paths that depend on no model, or whose requests name none.
const PATHS_WITHOUT_MODEL: [&str; 2] = ["/parse_function_call", "/separate_reasoning"];

/// Substrings of paths by which both engines are administered.
const ADMINISTRATIVE_PATHS: [&str; 34] = [
    "abort_request",
    "adapter",
    "add_external_corpus",
    "collective_rpc",
    "configure_logging",
    "continue_generation",
    "derender",
    "dump",
    "elastic_ep",
    "expert_distribution",
    "fault_tolerance",
    "flush_cache",
    "freeze_gc",
    "hicache",
    "internal_state",
    "load_lora",
    "memory_occupation",
    "pause",
    "pd_role_switch",
    "profile",
    "register",
    "release_kv_cache",
    "remove_external_corpus",
    "reset_",
    "resume",
    "server_info",
    "set_trace_level",
    "sleep",
    "slow_down",
    "storage-backend",
    "transfer_engine",
    "wake_up",
    "weight",
    "world_size",
];

/// An additional path open to clients: exact, or with a trailing `/*` for everything below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InferencePath {
    /// The path without its `/*`.
    path: String,
    is_prefix: bool,
}

/// Why a path cannot be opened to clients.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InferencePathError {
    #[error("{0:?} is not a path of an engine; give one such as /invocations, or /v1/images/* for all below")]
    NotAPath(String),
    #[error(
        "{text} administers engines and is never open to clients; use /engines/ENGINE{path} on the admin listener"
    )]
    Administrative {
        /// The setting: the path, possibly with `/*`.
        text: String,
        path: String,
    },
}

impl FromStr for InferencePath {
    type Err = InferencePathError;

    fn from_str(text: &str) -> Result<Self, InferencePathError> {
        let (path, is_prefix) = text.strip_suffix("/*").map_or((text, false), |path| (path, true));
        let is_canonical =
            path.starts_with('/') && canonical_path(path).is_ok_and(|canonical| canonical == path);
        if !is_canonical || path == "/" || path.contains(['*', '{', '}']) {
            return Err(InferencePathError::NotAPath(text.to_owned()));
        }
        if is_administrative(path) {
            return Err(InferencePathError::Administrative { text: text.to_owned(), path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), is_prefix })
    }
}

impl InferencePath {
    /// Whether it permits `path`, which is in canonical form.
    pub(super) fn matches(&self, path: &str) -> bool {
        match path.strip_prefix(self.path.as_str()) {
            Some("") => !self.is_prefix,
            Some(rest) => self.is_prefix && rest.starts_with('/') && !is_administrative(path),
            None => false,
        }
    }
}

/// Whether the path accepts forms. Configured paths accept whatever their engine accepts.
pub(super) fn takes_forms(path: &str) -> bool {
    FORM_PATHS.contains(&path) || !INFERENCE_PATHS.contains(&path)
}

/// Whether a request with a body must name its model if there are several. Engines use a default for some paths, which would be
/// that of an arbitrary engine. Configured paths may have a format without a model.
pub(super) fn needs_model(path: &str) -> bool {
    INFERENCE_PATHS.contains(&path) && !PATHS_WITHOUT_MODEL.contains(&path)
}

/// Whether the path is never open to clients, whatever the settings.
fn is_administrative(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    ADMINISTRATIVE_PATHS.iter().any(|fragment| path.contains(fragment))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> InferencePath {
        text.parse().unwrap()
    }

    #[test]
    fn configured_paths_are_exact_or_prefixes() {
        assert!(path("/invocations").matches("/invocations"));
        assert!(!path("/invocations").matches("/invocations/x"));
        assert!(!path("/invocations").matches("/invocation"));
        let is_prefix = path("/v1/*");
        assert!(is_prefix.matches("/v1/images/edits") && is_prefix.matches("/v1/x"));
        assert!(!is_prefix.matches("/v1") && !is_prefix.matches("/v1x") && !is_prefix.matches("/v2/x"));
        for administrative in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/x/Flush_Cache"] {
            assert!(!is_prefix.matches(administrative), "{administrative}");
        }
    }

    #[test]
    fn invalid_and_administrative_paths_are_rejected() {
        for text in
            ["", "/", "/*", "*", "v1/x", "/v1/../x", "/a//b", "/a/", "/a%62", "/a/*/b", "/{id}", "/a?b"]
        {
            assert!(matches!(text.parse::<InferencePath>(), Err(InferencePathError::NotAPath(_))), "{text}");
        }
        for text in [
            "/flush_cache",
            "/v1/load_lora_adapter",
            "/hicache/*",
            "/update_weights_from_disk",
            "/reset_prefix_cache",
        ] {
            assert!(
                matches!(text.parse::<InferencePath>(), Err(InferencePathError::Administrative { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn paths_that_compute_with_a_model_need_one() {
        assert!(needs_model("/v1/embeddings") && needs_model("/tokenize") && needs_model("/v1/images/edits"));
        assert!(!needs_model("/separate_reasoning") && !needs_model("/invocations"));
        assert!(PATHS_WITHOUT_MODEL.iter().all(|path| INFERENCE_PATHS.contains(path)));
    }

    #[test]
    fn inference_paths_are_not_administrative() {
        for path in INFERENCE_PATHS {
            assert!(!is_administrative(path), "{path}");
        }
    }
}
