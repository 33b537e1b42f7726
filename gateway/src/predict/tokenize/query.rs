//! Queries for tokens: the members of a request's body that affect its prompt.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hash as _, Hasher as _};

use bytes::Bytes;
use moongate_discovery::EngineKind;
use moongate_tokenize::{ChatBody, PromptError, TextBody, TextPrompt};
use serde_json::value::RawValue;

use super::EngineTokenizeError;
use crate::fleet::TokenizeMethod;
use crate::predict::models::dialect;
use crate::predict::prompt_tokens::PredictionError;
use crate::request_body::InferenceApi;

/// Members that affect the response, not the prompt. They are not sent: a `stream` changes SGLang's response format, and others may
/// be rejected. Unlisted members are sent, or exclude methods that do not support them.
const IGNORED_MEMBERS: [&str; 41] = [
    "best_of",
    "cache_control",
    "cache_salt",
    "extra_key",
    "frequency_penalty",
    "ignore_eos",
    "kv_transfer_params",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "min_tokens",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "repetition_penalty",
    "return_logprob",
    "return_token_ids",
    "rid",
    "safety_identifier",
    "sampling_params",
    "seed",
    "service_tier",
    "session_id",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
];

/// Members of a chat completion that vLLM's `/tokenize` supports too.
const VLLM_TOKENIZE_MEMBERS: [&str; 8] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "model",
    "tools",
];
/// Members that SGLang's `/tokenize` interprets and its chat completions do not. It passes all others to the code of chat
/// completions.
const SGLANG_TOKENIZE_MEMBERS: [&str; 3] = ["add_generation_prompt", "add_special_tokens", "prompt"];
/// Members of a completion that `/tokenize` supports.
const TEXT_MEMBERS: [&str; 4] = ["add_special_tokens", "model", "prompt", "text"];

#[derive(Debug)]
pub(super) struct TokenizeQuery<'a> {
    engine: EngineKind,
    members: BTreeMap<String, &'a RawValue>,
    /// The methods that return the engine's own tokens for it, the best first.
    pub(super) methods: Vec<TokenizeMethod>,
}

impl<'a> TokenizeQuery<'a> {
    /// Builds the query from a request's body.
    ///
    /// # Errors
    ///
    /// The engine would not return the prompt's real tokens, or there is more than one prompt.
    pub(super) fn read(
        api: InferenceApi,
        engine: EngineKind,
        body: &'a [u8],
    ) -> Result<Self, PredictionError> {
        check(api, engine, body)?;
        let mut members: BTreeMap<String, &RawValue> = serde_json::from_slice(body)
            .map_err(|error| PredictionError::Prompt(PromptError::Malformed(error.to_string())))?;
        members.retain(|name, value| {
            value.get() != "null" && (!IGNORED_MEMBERS.contains(&name.as_str()) || is_required(api, name))
        });
        let mut query = Self { engine, members, methods: Vec::new() };
        query.methods = query.usable_methods(api);
        if query.methods.is_empty() {
            Err(PredictionError::EngineTokenize(EngineTokenizeError::NotOffered))
        } else {
            Ok(query)
        }
    }

    fn usable_methods(&self, api: InferenceApi) -> Vec<TokenizeMethod> {
        let only = |known: &[&str]| self.members.keys().all(|name| known.contains(&name.as_str()));
        match (self.engine, api) {
            (EngineKind::Vllm, InferenceApi::Chat) => {
                let known = self.members.iter().all(|(name, value)| {
                    VLLM_TOKENIZE_MEMBERS.contains(&name.as_str()) || is_default(name, value)
                });
                [Some(TokenizeMethod::RenderChat), known.then_some(TokenizeMethod::TokenizeChat)]
                    .into_iter()
                    .flatten()
                    .collect()
            }
            (EngineKind::Vllm, InferenceApi::Completions) => [
                Some(TokenizeMethod::RenderText),
                only(&TEXT_MEMBERS).then_some(TokenizeMethod::TokenizeText),
            ]
            .into_iter()
            .flatten()
            .collect(),
            (EngineKind::Vllm, InferenceApi::Messages) => vec![TokenizeMethod::RenderMessages],
            (EngineKind::Vllm, InferenceApi::Responses) => vec![TokenizeMethod::RenderResponses],
            (EngineKind::Sglang, InferenceApi::Chat) => vec![TokenizeMethod::TokenizeChat],
            (EngineKind::Sglang, InferenceApi::Completions | InferenceApi::Generate)
                if only(&TEXT_MEMBERS) =>
            {
                vec![TokenizeMethod::TokenizeText]
            }
            _ => Vec::new(),
        }
    }

    /// Equal for requests whose prompts are equal in an engine of this kind.
    pub(super) fn hash(&self, api: InferenceApi, model: &str, hasher: &impl BuildHasher) -> u64 {
        let mut state = hasher.build_hasher();
        (self.engine, api, model).hash(&mut state);
        for (name, value) in self.members.iter().filter(|(name, _)| !is_required(api, name)) {
            (name, value.get()).hash(&mut state);
        }
        state.finish()
    }

    /// The body of the query.
    pub(super) fn body(&self, method: TokenizeMethod) -> Bytes {
        let mut body = Vec::with_capacity(
            2 + self.members.iter().map(|(name, value)| name.len() + value.get().len() + 4).sum::<usize>(),
        );
        for (name, value) in self.members.iter().filter(|(name, value)| self.is_sent(method, name, value)) {
            // SGLang's `/generate` uses another name for it.
            let name = if method == TokenizeMethod::TokenizeText && name == "text" { "prompt" } else { name };
            body.push(if body.is_empty() { b'{' } else { b',' });
            body.extend_from_slice(serde_json::Value::from(name).to_string().as_bytes());
            body.push(b':');
            body.extend_from_slice(value.get().as_bytes());
        }
        body.push(b'}');
        body.into()
    }

    fn is_sent(&self, method: TokenizeMethod, name: &str, value: &RawValue) -> bool {
        match (method, self.engine) {
            (TokenizeMethod::TokenizeChat, EngineKind::Sglang) => !SGLANG_TOKENIZE_MEMBERS.contains(&name),
            (TokenizeMethod::TokenizeChat, EngineKind::Vllm) => !is_default(name, value),
            _ => true,
        }
    }
}

/// Whether a member that does not affect the prompt must be sent nevertheless.
fn is_required(api: InferenceApi, name: &str) -> bool {
    api == InferenceApi::Messages && name == "max_tokens"
}

/// Whether a member only repeats its default value.
fn is_default(name: &str, value: &RawValue) -> bool {
    name == "tool_choice" && value.get() == "\"auto\""
}

/// Rejects bodies whose tokens an engine would return incorrectly.
fn check(api: InferenceApi, engine: EngineKind, body: &[u8]) -> Result<(), PredictionError> {
    match api {
        InferenceApi::Chat | InferenceApi::Responses | InferenceApi::Messages => {
            let conversation = api.conversation().unwrap_or_default();
            let chat = ChatBody::parse_conversation(conversation, dialect(engine), body)
                .map_err(PredictionError::Prompt)?;
            if engine == EngineKind::Sglang && chat.has_input_ids() {
                return Err(PredictionError::Prompt(PromptError::UnsupportedMember("input_ids")));
            }
            chat.check_text().map_err(PredictionError::Prompt)
        }
        InferenceApi::Completions | InferenceApi::Generate => {
            match TextBody::parse(body).map_err(PredictionError::Prompt)?.prompts.as_slice() {
                [TextPrompt::Text(_)] => Ok(()),
                _ => Err(PredictionError::NotSinglePrompt),
            }
        }
        InferenceApi::Other => Err(PredictionError::NotSinglePrompt),
    }
}

#[cfg(test)]
mod tests {
    use std::hash::RandomState;

    use serde_json::{Value, json};

    use super::*;

    fn query_bodies(
        engine: EngineKind,
        api: InferenceApi,
        body: &Value,
    ) -> Result<Vec<(TokenizeMethod, Value)>, PredictionError> {
        let body = body.to_string();
        let query = TokenizeQuery::read(api, engine, body.as_bytes())?;
        Ok(query
            .methods
            .iter()
            .map(|method| (*method, serde_json::from_slice(&query.body(*method)).unwrap()))
            .collect())
    }

    fn chat(more: &Value) -> Value {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "a \" b"}],
            "stream": true, "temperature": 0.5, "max_tokens": 9, "user_field": null});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    }

    #[test]
    fn only_members_that_affect_the_prompt_are_sent() {
        let plain = json!({"model": "m", "messages": [{"role": "user", "content": "a \" b"}]});
        let queries = query_bodies(EngineKind::Vllm, InferenceApi::Chat, &chat(&json!({}))).unwrap();
        assert_eq!(
            queries,
            [(TokenizeMethod::RenderChat, plain.clone()), (TokenizeMethod::TokenizeChat, plain.clone())]
        );
        // Members about caching and identity.
        let about = json!({"prompt_cache_retention": "24h", "cache_control": {"type": "ephemeral"}, "prompt_cache_key": "k",
            "safety_identifier": "s", "session_id": "c", "user": "u"});
        assert_eq!(query_bodies(EngineKind::Vllm, InferenceApi::Chat, &chat(&about)).unwrap(), queries);
        let more = chat(&json!({"add_generation_prompt": true, "reasoning_effort": "low"}));
        let queries = query_bodies(EngineKind::Sglang, InferenceApi::Chat, &more).unwrap();
        let mut expected = plain;
        expected["reasoning_effort"] = json!("low");
        assert_eq!(queries, [(TokenizeMethod::TokenizeChat, expected)]);
    }

    #[test]
    fn a_method_without_a_member_is_not_used() {
        let queries = |engine, more: Value| -> Vec<TokenizeMethod> {
            query_bodies(engine, InferenceApi::Chat, &chat(&more))
                .unwrap()
                .into_iter()
                .map(|(method, _)| method)
                .collect()
        };
        assert_eq!(
            queries(EngineKind::Vllm, json!({"reasoning_effort": "low"})),
            [TokenizeMethod::RenderChat]
        );
        assert_eq!(
            queries(EngineKind::Vllm, json!({"tool_choice": "none", "tools": []})),
            [TokenizeMethod::RenderChat]
        );
        let auto = queries(EngineKind::Vllm, json!({"tool_choice": "auto", "tools": []}));
        assert_eq!(auto, [TokenizeMethod::RenderChat, TokenizeMethod::TokenizeChat]);
    }

    #[test]
    fn texts_use_the_member_name_of_tokenize() {
        let body = json!({"text": "abc", "sampling_params": {"n": 1}, "stream": true});
        let expected = [(TokenizeMethod::TokenizeText, json!({"prompt": "abc"}))];
        assert_eq!(query_bodies(EngineKind::Sglang, InferenceApi::Generate, &body).unwrap(), expected);
        let body = json!({"prompt": "abc", "model": "m", "echo": true});
        let render = query_bodies(EngineKind::Vllm, InferenceApi::Completions, &body).unwrap();
        assert_eq!(render, [(TokenizeMethod::RenderText, body.clone())], "it might matter");
        let not_offered = PredictionError::EngineTokenize(EngineTokenizeError::NotOffered);
        assert_eq!(
            query_bodies(EngineKind::Sglang, InferenceApi::Completions, &body),
            Err(not_offered.clone())
        );
        assert_eq!(
            query_bodies(EngineKind::Vllm, InferenceApi::Generate, &json!({"text": "abc"})),
            Err(not_offered)
        );
    }

    #[test]
    fn unreliable_prompts_are_not_queried() {
        let image = chat(&json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}));
        for engine in [EngineKind::Sglang, EngineKind::Vllm] {
            let result = query_bodies(engine, InferenceApi::Chat, &image);
            assert!(matches!(result, Err(PredictionError::Prompt(PromptError::Multimodal(_)))), "{result:?}");
            let batch = json!({"prompt": ["a", "b"]});
            assert_eq!(
                query_bodies(engine, InferenceApi::Completions, &batch),
                Err(PredictionError::NotSinglePrompt)
            );
        }
        assert!(
            query_bodies(EngineKind::Sglang, InferenceApi::Chat, &chat(&json!({"input_ids": [1]}))).is_err()
        );
    }

    #[test]
    fn equal_prompts_have_equal_hashes_and_others_do_not() {
        let hasher = RandomState::new();
        let hash = |api, engine, body: &Value| {
            let body = body.to_string();
            TokenizeQuery::read(api, engine, body.as_bytes()).unwrap().hash(api, "m", &hasher)
        };
        let one = hash(InferenceApi::Chat, EngineKind::Vllm, &chat(&json!({})));
        assert_eq!(
            hash(InferenceApi::Chat, EngineKind::Vllm, &chat(&json!({"temperature": 0.1, "n": 2}))),
            one
        );
        assert_ne!(hash(InferenceApi::Chat, EngineKind::Sglang, &chat(&json!({}))), one);
        assert_ne!(
            hash(InferenceApi::Chat, EngineKind::Vllm, &chat(&json!({"chat_template_kwargs": {"a": 1}}))),
            one
        );
    }

    #[test]
    fn vllm_renders_the_apis_of_agents() {
        let bodies = |api, body: &Value| query_bodies(EngineKind::Vllm, api, body).unwrap();
        let message = json!({"model": "m", "max_tokens": 9, "stream": true, "metadata": {"user_id": "u"},
            "messages": [{"role": "user", "content": "hi"}], "system": "s"});
        let sent = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "system": "s"});
        assert_eq!(bodies(InferenceApi::Messages, &message), vec![(TokenizeMethod::RenderMessages, sent)]);
        let response = json!({"model": "m", "max_output_tokens": 9, "store": false, "input": "hi"});
        let sent = json!({"model": "m", "input": "hi"});
        assert_eq!(bodies(InferenceApi::Responses, &response), vec![(TokenizeMethod::RenderResponses, sent)]);
        let continued = json!({"model": "m", "input": "hi", "previous_response_id": "resp_1"});
        assert!(query_bodies(EngineKind::Vllm, InferenceApi::Responses, &continued).is_err());
        assert!(query_bodies(EngineKind::Sglang, InferenceApi::Messages, &message).is_err(), "not offered");
    }
}
