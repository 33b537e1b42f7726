//! Requests for log probabilities of prompt tokens: an engine must compute these tokens even if it has them in its cache.
//!
//! According to vLLM 0.32 (`sampling_params.py` `skip_reading_prefix_cache`, `entrypoints/openai/…/protocol.py` `to_sampling_params`)
//! and SGLang 0.5.23 (`managers/schedule_batch.py` `_compute_max_prefix_len`, `entrypoints/openai/serving_completions.py`).

use moongate_discovery::EngineKind;
use serde::Deserialize;
use serde_json::Value;

use crate::request_body::{InferenceApi, RoutingFields};

/// How many of a prompt's tokens an engine may take from its cache; `None`: all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ReuseLimits {
    vllm: Option<usize>,
    sglang: Option<usize>,
}

/// The members that request log probabilities.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LogprobMembers {
    prompt_logprobs: Value,
    echo: Value,
    logprobs: Value,
    return_logprob: Value,
    logprob_start_len: Value,
}

impl ReuseLimits {
    /// Parses the body only if it has a member that may limit the reuse.
    pub(super) fn read(api: InferenceApi, fields: &RoutingFields<'_>, body: &[u8]) -> Self {
        if !fields.may_limit_reuse {
            return Self::default();
        }
        // The engine rejects a body that cannot be parsed.
        let members: LogprobMembers = serde_json::from_slice(body).unwrap_or_default();
        match api {
            InferenceApi::Chat => {
                // An echo requests `top_logprobs` of the prompt too, which is a number even if the client sends none.
                let vllm = !members.prompt_logprobs.is_null() || is_true(&members.echo);
                Self { vllm: vllm.then_some(0), sglang: None }
            }
            InferenceApi::Completions => {
                let echoes = is_true(&members.echo);
                let vllm = !members.prompt_logprobs.is_null() || (echoes && !members.logprobs.is_null());
                let sglang = echoes && is_true(&members.logprobs);
                Self { vllm: vllm.then_some(0), sglang: sglang.then_some(0) }
            }
            InferenceApi::Generate => Self { vllm: None, sglang: members.first_requested() },
            InferenceApi::Responses | InferenceApi::Messages | InferenceApi::Other => Self::default(),
        }
    }

    /// The limit for engines of this kind.
    pub(super) fn for_engine(self, engine: EngineKind) -> Option<usize> {
        match engine {
            EngineKind::Vllm => self.vllm,
            EngineKind::Sglang => self.sglang,
        }
    }
}

impl LogprobMembers {
    /// First prompt token whose log probability SGLang's own API must return; the smallest of a batch.
    fn first_requested(&self) -> Option<usize> {
        if !is_true(&self.return_logprob) {
            return None;
        }
        let starts = match &self.logprob_start_len {
            Value::Array(starts) => starts.as_slice(),
            start => std::slice::from_ref(start),
        };
        // -1 stands for the end of the prompt.
        starts
            .iter()
            .filter_map(Value::as_u64)
            .map(|start| usize::try_from(start).unwrap_or(usize::MAX))
            .min()
    }
}

/// Whether Python takes the value for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(api: InferenceApi, members: &str) -> (Option<usize>, Option<usize>) {
        let prompt = match api {
            InferenceApi::Chat => r#""messages":[{"role":"user","content":"\"echo\""}]"#,
            InferenceApi::Completions => r#""prompt":"a""#,
            _ => r#""text":"a""#,
        };
        let body = format!("{{{prompt}{members}}}");
        let fields = RoutingFields::read(api, body.as_bytes()).unwrap();
        let limits = ReuseLimits::read(api, &fields, body.as_bytes());
        (limits.for_engine(EngineKind::Vllm), limits.for_engine(EngineKind::Sglang))
    }

    #[test]
    fn vllm_computes_prompts_with_logprobs_completely() {
        let chat = |members| limits(InferenceApi::Chat, members);
        assert_eq!(chat(r#","logprobs":true,"top_logprobs":5"#), (None, None));
        assert_eq!(chat(r#","prompt_logprobs":0"#), (Some(0), None));
        assert_eq!(chat(r#","prompt_logprobs":null,"echo":false"#), (None, None));
        assert_eq!(chat(r#","echo":true"#), (Some(0), None), "top_logprobs is 0 by default");
        assert_eq!(chat(r#","echo":true,"top_logprobs":null"#), (Some(0), None));
    }

    #[test]
    fn completions_echo_the_logprobs_of_a_prompt() {
        let completions = |members| limits(InferenceApi::Completions, members);
        assert_eq!(completions(r#","echo":true"#), (None, None));
        assert_eq!(completions(r#","logprobs":3"#), (None, None));
        assert_eq!(completions(r#","echo":true,"logprobs":3"#), (Some(0), Some(0)));
        assert_eq!(completions(r#","echo":true,"logprobs":0"#), (Some(0), None));
        assert_eq!(completions(r#","prompt_logprobs":1"#), (Some(0), None), "SGLang has no such member");
    }

    #[test]
    fn sglang_reuses_tokens_before_the_first_logprob() {
        let generate = |members| limits(InferenceApi::Generate, members).1;
        assert_eq!(generate(r#","return_logprob":true"#), None);
        assert_eq!(generate(r#","logprob_start_len":7"#), None);
        assert_eq!(generate(r#","return_logprob":true,"logprob_start_len":-1"#), None);
        assert_eq!(generate(r#","return_logprob":true,"logprob_start_len":700"#), Some(700));
        assert_eq!(
            generate(r#","return_logprob":[false,true],"logprob_start_len":[90,-1,80]"#),
            Some(80),
            "the smallest of a batch"
        );
    }
}
