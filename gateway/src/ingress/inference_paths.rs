//! Which paths of engines clients reach. Deny by default: an engine's other paths load adapters, flush caches and put it to sleep.

use std::str::FromStr;

use super::request_target::canonical_path;

/// Methods of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AllowedMethods {
    Post,
    Get,
    GetAndDelete,
}

/// Inference paths of vLLM 0.32 and SGLang 0.5.23 that go to one engine as they are. `{id}` is one segment.
pub(super) const INFERENCE_PATHS: [(&str, AllowedMethods); 33] = [
    ("/classify", AllowedMethods::Post),
    ("/cohere/v2/chat", AllowedMethods::Post),
    ("/detokenize", AllowedMethods::Post),
    ("/encode", AllowedMethods::Post),
    ("/generative_scoring", AllowedMethods::Post),
    ("/parse_function_call", AllowedMethods::Post),
    ("/pooling", AllowedMethods::Post),
    ("/rerank", AllowedMethods::Post),
    ("/score", AllowedMethods::Post),
    ("/separate_reasoning", AllowedMethods::Post),
    ("/tokenize", AllowedMethods::Post),
    ("/v1/audio/speech", AllowedMethods::Post),
    ("/v1/audio/transcriptions", AllowedMethods::Post),
    ("/v1/audio/translations", AllowedMethods::Post),
    ("/v1/chat/completions/batch", AllowedMethods::Post),
    ("/v1/classify", AllowedMethods::Post),
    ("/v1/decisions", AllowedMethods::Post),
    ("/v1/detokenize", AllowedMethods::Post),
    ("/v1/embeddings", AllowedMethods::Post),
    ("/v1/images/generations", AllowedMethods::Post),
    ("/v1/messages", AllowedMethods::Post),
    ("/v1/messages/count_tokens", AllowedMethods::Post),
    ("/v1/moderations", AllowedMethods::Post),
    ("/v1/rerank", AllowedMethods::Post),
    ("/v1/responses", AllowedMethods::Post),
    ("/v1/responses/{id}", AllowedMethods::GetAndDelete),
    ("/v1/responses/{id}/cancel", AllowedMethods::Post),
    ("/v1/responses/{id}/input_items", AllowedMethods::Get),
    ("/v1/score", AllowedMethods::Post),
    ("/v1/systemone", AllowedMethods::Post),
    ("/v1/tokenize", AllowedMethods::Post),
    ("/v2/embed", AllowedMethods::Post),
    ("/v2/rerank", AllowedMethods::Post),
];

/// Those of them that take a form with a file in it beside JSON.
const FORM_PATHS: [&str; 2] = ["/v1/audio/transcriptions", "/v1/audio/translations"];

/// Segments of paths by which engines are administered, or parts of them, as both engines have them.
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

/// A further path that clients may reach: exact, or with `/*` at its end for everything below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InferencePath {
    /// Without the `/*`.
    path: String,
    is_prefix: bool,
}

impl FromStr for InferencePath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, below) = text.strip_suffix("/*").map_or((text, false), |path| (path, true));
        let is_canonical =
            path.starts_with('/') && canonical_path(path).is_ok_and(|canonical| canonical == path);
        if !is_canonical || path == "/" || path.contains(['*', '{', '}']) {
            return Err(format!(
                "{text:?} is no path of an engine; give one such as /invocations, or /v1/images/* for all below"
            ));
        }
        if is_administrative(path) {
            return Err(format!(
                "{text} administers engines, which clients never may; use /engines/ENGINE{path} on the admin listener"
            ));
        }
        Ok(Self { path: path.to_owned(), is_prefix: below })
    }
}

impl InferencePath {
    /// Whether it lets `path` through, which is in canonical form.
    pub(super) fn matches(&self, path: &str) -> bool {
        match path.strip_prefix(self.path.as_str()) {
            Some("") => !self.is_prefix,
            Some(rest) => self.is_prefix && rest.starts_with('/') && !is_administrative(path),
            None => false,
        }
    }
}

/// Whether a form may come by this path. The settings' paths may take anything that their engine takes.
pub(super) fn takes_forms(path: &str) -> bool {
    FORM_PATHS.contains(&path) || !INFERENCE_PATHS.iter().any(|(known, _)| *known == path)
}

/// Whether clients never reach it, whatever the settings say.
fn is_administrative(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    ADMINISTRATIVE_PATHS.iter().any(|part| path.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> InferencePath {
        text.parse().unwrap()
    }

    #[test]
    fn a_path_of_the_settings_is_exact_or_a_prefix() {
        assert!(path("/invocations").matches("/invocations"));
        assert!(!path("/invocations").matches("/invocations/x"));
        assert!(!path("/invocations").matches("/invocation"));
        let below = path("/v1/*");
        assert!(below.matches("/v1/images/edits") && below.matches("/v1/x"));
        assert!(!below.matches("/v1") && !below.matches("/v1x") && !below.matches("/v2/x"));
        for administrative in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/x/Flush_Cache"] {
            assert!(!below.matches(administrative), "{administrative}");
        }
    }

    #[test]
    fn what_is_no_path_or_administers_is_refused() {
        for text in
            ["", "/", "/*", "*", "v1/x", "/v1/../x", "/a//b", "/a/", "/a%62", "/a/*/b", "/{id}", "/a?b"]
        {
            assert!(text.parse::<InferencePath>().unwrap_err().contains("no path"), "{text}");
        }
        for text in [
            "/flush_cache",
            "/v1/load_lora_adapter",
            "/hicache/*",
            "/update_weights_from_disk",
            "/reset_prefix_cache",
        ] {
            assert!(text.parse::<InferencePath>().unwrap_err().contains("admin listener"), "{text}");
        }
    }

    #[test]
    fn no_inference_path_administers() {
        for (path, _) in INFERENCE_PATHS {
            assert!(!is_administrative(path), "{path}");
        }
    }
}
