//! What an engine is asked: the members of a request's body that decide on its prompt.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hash as _, Hasher as _};

use bytes::Bytes;
use moongate_discovery::Engine;
use moongate_prompt::{ChatBody, TextBody, TextPrompt, Unpredictable};
use serde_json::value::RawValue;

use super::NotTold;
use super::ways::Way;
use crate::predict::tokens::Unknown;
use crate::prompt::Api;

/// Members that steer the answer, not the prompt. They are not sent: a `stream` changes how SGLang answers, and what the rest asks for
/// may be refused. What is not listed is sent, or keeps a way from being used that does not know it.
const NOT_OF_THE_PROMPT: [&str; 33] = [
    "best_of",
    "cache_salt",
    "extra_key",
    "frequency_penalty",
    "ignore_eos",
    "kv_transfer_params",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "min_tokens",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "return_logprob",
    "return_token_ids",
    "rid",
    "sampling_params",
    "seed",
    "service_tier",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
];

/// Members of a chat completion that vLLM's `/tokenize` knows too.
const VLLM_TOKENIZES: [&str; 8] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "model",
    "tools",
];
/// Members that SGLang's `/tokenize` reads and its chat completions do not. All others it hands on to the latter's own code.
const SGLANG_ONLY_TOKENIZES: [&str; 3] = ["add_generation_prompt", "add_special_tokens", "prompt"];
/// Members of a completion that `/tokenize` knows.
const TEXT: [&str; 4] = ["add_special_tokens", "model", "prompt", "text"];

/// One question for tokens.
#[derive(Debug)]
pub(super) struct Query<'a> {
    engine: Engine,
    members: BTreeMap<String, &'a RawValue>,
    /// The ways that answer it as the engine would see it, the best first.
    pub(super) ways: Vec<Way>,
}

impl<'a> Query<'a> {
    /// Reads the question from a request's body.
    ///
    /// # Errors
    /// The engine would not tell what the prompt becomes, or there is more than one.
    pub(super) fn read(api: Api, engine: Engine, body: &'a [u8]) -> Result<Self, Unknown> {
        check(api, engine, body)?;
        let mut members: BTreeMap<String, &RawValue> = serde_json::from_slice(body)
            .map_err(|error| Unknown::Prompt(Unpredictable::Refused(error.to_string())))?;
        members.retain(|name, value| value.get() != "null" && !NOT_OF_THE_PROMPT.contains(&name.as_str()));
        let mut query = Self { engine, members, ways: Vec::new() };
        query.ways = query.usable_ways(api);
        if query.ways.is_empty() { Err(Unknown::NotTold(NotTold::NotOffered)) } else { Ok(query) }
    }

    fn usable_ways(&self, api: Api) -> Vec<Way> {
        let only = |known: &[&str]| self.members.keys().all(|name| known.contains(&name.as_str()));
        match (self.engine, api) {
            (Engine::Vllm, Api::Chat) => {
                let known = self
                    .members
                    .iter()
                    .all(|(name, value)| VLLM_TOKENIZES.contains(&name.as_str()) || is_default(name, value));
                [Some(Way::RenderChat), known.then_some(Way::TokenizeChat)].into_iter().flatten().collect()
            }
            (Engine::Vllm, Api::Completions) => {
                [Some(Way::RenderText), only(&TEXT).then_some(Way::TokenizeText)]
                    .into_iter()
                    .flatten()
                    .collect()
            }
            (Engine::Sglang, Api::Chat) => vec![Way::TokenizeChat],
            (Engine::Sglang, Api::Completions | Api::Generate) if only(&TEXT) => vec![Way::TokenizeText],
            _ => Vec::new(),
        }
    }

    /// Equal for requests whose prompts are equal in an engine of this kind.
    pub(super) fn hash(&self, api: Api, model: &str, hasher: &impl BuildHasher) -> u64 {
        let mut state = hasher.build_hasher();
        (self.engine, api, model).hash(&mut state);
        for (name, value) in &self.members {
            (name, value.get()).hash(&mut state);
        }
        state.finish()
    }

    /// The body to send.
    pub(super) fn body(&self, way: Way) -> Bytes {
        let mut body = Vec::with_capacity(
            2 + self.members.iter().map(|(name, value)| name.len() + value.get().len() + 4).sum::<usize>(),
        );
        for (name, value) in self.members.iter().filter(|(name, value)| self.sends(way, name, value)) {
            // SGLang's `/generate` has another name for it.
            let name = if way == Way::TokenizeText && name == "text" { "prompt" } else { name };
            body.push(if body.is_empty() { b'{' } else { b',' });
            body.extend_from_slice(serde_json::Value::from(name).to_string().as_bytes());
            body.push(b':');
            body.extend_from_slice(value.get().as_bytes());
        }
        body.push(b'}');
        body.into()
    }

    fn sends(&self, way: Way, name: &str, value: &RawValue) -> bool {
        match (way, self.engine) {
            (Way::TokenizeChat, Engine::Sglang) => !SGLANG_ONLY_TOKENIZES.contains(&name),
            (Way::TokenizeChat, Engine::Vllm) => !is_default(name, value),
            _ => true,
        }
    }
}

/// Whether a member says what holds without it.
fn is_default(name: &str, value: &RawValue) -> bool {
    name == "tool_choice" && value.get() == "\"auto\""
}

/// Refuses what an engine could only tell wrongly.
fn check(api: Api, engine: Engine, body: &[u8]) -> Result<(), Unknown> {
    match api {
        Api::Chat => {
            let chat = ChatBody::parse(body).map_err(Unknown::Prompt)?;
            if engine == Engine::Sglang && chat.has_input_ids() {
                return Err(Unknown::Prompt(Unpredictable::Unknown("input_ids")));
            }
            chat.check_text().map_err(Unknown::Prompt)
        }
        Api::Completions | Api::Generate => {
            match TextBody::parse(body).map_err(Unknown::Prompt)?.prompts.as_slice() {
                [TextPrompt::Text(_)] => Ok(()),
                _ => Err(Unknown::Batch),
            }
        }
        Api::Other => Err(Unknown::Batch),
    }
}

#[cfg(test)]
mod tests {
    use std::hash::RandomState;

    use serde_json::{Value, json};

    use super::*;

    fn asked(engine: Engine, api: Api, body: &Value) -> Result<Vec<(Way, Value)>, Unknown> {
        let body = body.to_string();
        let query = Query::read(api, engine, body.as_bytes())?;
        Ok(query.ways.iter().map(|way| (*way, serde_json::from_slice(&query.body(*way)).unwrap())).collect())
    }

    fn chat(more: &Value) -> Value {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "a \" b"}],
            "stream": true, "temperature": 0.5, "max_tokens": 9, "user_field": null});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    }

    #[test]
    fn what_decides_on_the_prompt_is_sent_and_nothing_else() {
        let plain = json!({"model": "m", "messages": [{"role": "user", "content": "a \" b"}]});
        let ways = asked(Engine::Vllm, Api::Chat, &chat(&json!({}))).unwrap();
        assert_eq!(ways, [(Way::RenderChat, plain.clone()), (Way::TokenizeChat, plain.clone())]);
        let more = chat(&json!({"add_generation_prompt": true, "reasoning_effort": "low"}));
        let ways = asked(Engine::Sglang, Api::Chat, &more).unwrap();
        let mut expected = plain;
        expected["reasoning_effort"] = json!("low");
        assert_eq!(ways, [(Way::TokenizeChat, expected)]);
    }

    #[test]
    fn a_way_that_does_not_know_a_member_is_not_used() {
        let ways = |engine, more: Value| -> Vec<Way> {
            asked(engine, Api::Chat, &chat(&more)).unwrap().into_iter().map(|(way, _)| way).collect()
        };
        assert_eq!(ways(Engine::Vllm, json!({"reasoning_effort": "low"})), [Way::RenderChat]);
        assert_eq!(ways(Engine::Vllm, json!({"tool_choice": "none", "tools": []})), [Way::RenderChat]);
        let auto = ways(Engine::Vllm, json!({"tool_choice": "auto", "tools": []}));
        assert_eq!(auto, [Way::RenderChat, Way::TokenizeChat]);
    }

    #[test]
    fn texts_are_asked_for_under_the_name_that_tokenize_knows() {
        let body = json!({"text": "abc", "sampling_params": {"n": 1}, "stream": true});
        let expected = [(Way::TokenizeText, json!({"prompt": "abc"}))];
        assert_eq!(asked(Engine::Sglang, Api::Generate, &body).unwrap(), expected);
        let body = json!({"prompt": "abc", "model": "m", "echo": true});
        let render = asked(Engine::Vllm, Api::Completions, &body).unwrap();
        assert_eq!(render, [(Way::RenderText, body.clone())], "it might matter");
        let not_offered = Unknown::NotTold(NotTold::NotOffered);
        assert_eq!(asked(Engine::Sglang, Api::Completions, &body), Err(not_offered.clone()));
        assert_eq!(asked(Engine::Vllm, Api::Generate, &json!({"text": "abc"})), Err(not_offered));
    }

    #[test]
    fn what_engines_would_tell_wrongly_is_not_asked() {
        let image = chat(&json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}));
        for engine in [Engine::Sglang, Engine::Vllm] {
            let refused = asked(engine, Api::Chat, &image);
            assert!(matches!(refused, Err(Unknown::Prompt(Unpredictable::Multimodal(_)))), "{refused:?}");
            let batch = json!({"prompt": ["a", "b"]});
            assert_eq!(asked(engine, Api::Completions, &batch), Err(Unknown::Batch));
        }
        assert!(asked(Engine::Sglang, Api::Chat, &chat(&json!({"input_ids": [1]}))).is_err());
    }

    #[test]
    fn equal_prompts_have_equal_hashes_and_others_have_not() {
        let hasher = RandomState::new();
        let hash = |api, engine, body: &Value| {
            let body = body.to_string();
            Query::read(api, engine, body.as_bytes()).unwrap().hash(api, "m", &hasher)
        };
        let one = hash(Api::Chat, Engine::Vllm, &chat(&json!({})));
        assert_eq!(hash(Api::Chat, Engine::Vllm, &chat(&json!({"temperature": 0.1, "n": 2}))), one);
        assert_ne!(hash(Api::Chat, Engine::Sglang, &chat(&json!({}))), one);
        assert_ne!(hash(Api::Chat, Engine::Vllm, &chat(&json!({"chat_template_kwargs": {"a": 1}}))), one);
    }
}
