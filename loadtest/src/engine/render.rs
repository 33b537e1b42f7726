//! Responses in the engines' own formats: complete, and as event streams.

use serde_json::{Map, Value, json};

use super::cache::CachedTokens;
use super::config::SimProtocol;
use super::generation::{ChoiceGeneration, GenerationFinish, OutputPart, OutputToken};
use super::request::GenerationEndpoint;

/// Values that are the same in all parts of one response.
#[derive(Debug, Clone)]
pub(crate) struct ResponseRenderer {
    pub(crate) protocol: SimProtocol,
    pub(crate) endpoint: GenerationEndpoint,
    pub(crate) id: String,
    pub(crate) ids: Vec<String>,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) logprobs: bool,
    pub(crate) return_token_ids: bool,
    /// Number of prompts and of choices per prompt, for the usage.
    pub(crate) n: usize,
    /// Tool that the choices call, if any.
    pub(crate) tool: Option<String>,
    pub(crate) kv_transfer_params: Value,
    /// Whether this is an SGLang prefill engine's response.
    pub(crate) prefill_leg: bool,
    pub(crate) started_unix_s: f64,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ChoiceOutput {
    /// Content, or the arguments of the tool call.
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) reasoning_tokens: usize,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) token_texts: Vec<String>,
    pub(crate) finish: Option<GenerationFinish>,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached: CachedTokens,
    pub(crate) dp_rank: u32,
    pub(crate) prompt_ids: Vec<u32>,
    /// First prompt token with a log-probability (`/generate`).
    pub(crate) logprobs_from: Option<usize>,
}

impl ChoiceOutput {
    pub(crate) fn push(&mut self, piece: OutputToken) {
        match piece.part {
            OutputPart::Reasoning => {
                self.reasoning.push_str(&piece.text);
                self.reasoning_tokens += 1;
            }
            OutputPart::Content | OutputPart::ToolArguments => self.text.push_str(&piece.text),
        }
        self.token_ids.push(piece.id);
        self.token_texts.push(piece.text);
    }

    pub(crate) fn close(&mut self, finished: &ChoiceGeneration) {
        self.finish.clone_from(&finished.finish);
        self.prompt_tokens = finished.prompt_tokens;
        self.cached = finished.cached;
    }
}

fn finish_reason(finish: Option<&GenerationFinish>) -> Value {
    match finish {
        None => Value::Null,
        Some(GenerationFinish::Length) => json!("length"),
        Some(GenerationFinish::Stop(_)) => json!("stop"),
        Some(GenerationFinish::ToolCalls) => json!("tool_calls"),
        Some(GenerationFinish::Abort) => json!("abort"),
    }
}

fn matched_stop(finish: Option<&GenerationFinish>) -> Value {
    match finish {
        Some(GenerationFinish::Stop(Some(text))) => json!(text),
        _ => Value::Null,
    }
}

/// A synthetic but stable log-probability.
fn logprob(id: u32) -> f64 {
    -f64::from(id % 1_000) / 1_000.0
}

impl ResponseRenderer {
    /// Token counts over all choices; every prompt counts once.
    pub(crate) fn usage(&self, outputs: &[ChoiceOutput]) -> Value {
        let prompts = outputs.iter().step_by(self.n.max(1));
        let (prompt_tokens, cached) = prompts.fold((0, 0), |(tokens, cached), output| {
            (tokens + output.prompt_tokens, cached + output.cached.total())
        });
        let completion_tokens: usize = outputs.iter().map(|output| output.token_ids.len()).sum();
        let reasoning_tokens: usize = outputs.iter().map(|output| output.reasoning_tokens).sum();
        let total = prompt_tokens + completion_tokens;
        match self.protocol {
            SimProtocol::Sglang => json!({
                "prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens,
                "prompt_tokens_details": {"cached_tokens": cached}, "reasoning_tokens": reasoning_tokens,
            }),
            SimProtocol::Vllm => json!({
                "prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens,
                "prompt_tokens_details":
                    {"cached_tokens": cached, "created_cache_tokens": null, "multimodal_tokens": null},
                "completion_tokens_details":
                    (reasoning_tokens > 0).then(|| json!({"reasoning_tokens": reasoning_tokens})),
            }),
        }
    }

    /// `batched`: the prompts were a list, and `/generate` responds with a list.
    pub(crate) fn complete_response(&self, outputs: &[ChoiceOutput], batched: bool) -> Value {
        if self.endpoint == GenerationEndpoint::Generate {
            let mut all: Vec<Value> =
                outputs.iter().enumerate().map(|(index, output)| self.generate_item(index, output)).collect();
            return if batched || all.len() > 1 { Value::Array(all) } else { all.pop().unwrap_or_default() };
        }
        let choices: Vec<Value> =
            outputs.iter().enumerate().map(|(index, output)| self.complete_choice(index, output)).collect();
        let object =
            if self.endpoint == GenerationEndpoint::Chat { "chat.completion" } else { "text_completion" };
        let mut value = self.envelope(object, choices);
        value.insert("usage".to_owned(), self.usage(outputs));
        match self.protocol {
            SimProtocol::Sglang => {
                value.insert("metadata".to_owned(), json!({"weight_version": "default"}));
            }
            SimProtocol::Vllm => {
                if self.endpoint == GenerationEndpoint::Chat {
                    value.insert("prompt_logprobs".to_owned(), Value::Null);
                    value.insert("prompt_token_ids".to_owned(), Value::Null);
                }
                value.insert("service_tier".to_owned(), Value::Null);
                value.insert("system_fingerprint".to_owned(), json!("vllm-0.32.0-b4306732"));
                value.insert("kv_transfer_params".to_owned(), self.finished_transfer_params(outputs));
                value.insert("ec_transfer_params".to_owned(), Value::Null);
                value.insert("metrics".to_owned(), Value::Null);
            }
        }
        Value::Object(value)
    }

    /// The transfer parameters, with values that are known only after the prefill.
    pub(crate) fn finished_transfer_params(&self, outputs: &[ChoiceOutput]) -> Value {
        let mut params = self.kv_transfer_params.clone();
        if let (Some(params), Some(output)) = (params.as_object_mut(), outputs.first()) {
            params.insert("remote_prefill_cached_tokens".to_owned(), json!(output.cached.total()));
        }
        params
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut value = Map::new();
        value.insert("id".to_owned(), json!(self.id));
        value.insert("object".to_owned(), json!(object));
        value.insert("created".to_owned(), json!(self.created));
        value.insert("model".to_owned(), json!(self.model));
        value.insert("choices".to_owned(), Value::Array(choices));
        value
    }

    fn complete_choice(&self, index: usize, output: &ChoiceOutput) -> Value {
        let finish = output.finish.as_ref();
        let mut choice = Map::new();
        choice.insert("index".to_owned(), json!(index));
        if self.endpoint == GenerationEndpoint::Chat {
            choice.insert("message".to_owned(), self.message(index, output));
        } else {
            choice.insert("text".to_owned(), json!(output.text));
        }
        choice.insert("logprobs".to_owned(), self.logprobs(&output.token_ids, &output.token_texts));
        choice.insert("finish_reason".to_owned(), finish_reason(finish));
        match self.protocol {
            SimProtocol::Sglang => {
                choice.insert("matched_stop".to_owned(), matched_stop(finish));
            }
            SimProtocol::Vllm => {
                choice.insert("stop_reason".to_owned(), matched_stop(finish));
                let ids = |ids: &[u32]| if self.return_token_ids { json!(ids) } else { Value::Null };
                choice.insert("token_ids".to_owned(), ids(&output.token_ids));
                choice.insert("routed_experts".to_owned(), Value::Null);
                if self.endpoint == GenerationEndpoint::Completion {
                    choice.insert("prompt_logprobs".to_owned(), Value::Null);
                    choice.insert("prompt_token_ids".to_owned(), ids(&output.prompt_ids));
                }
            }
        }
        Value::Object(choice)
    }

    /// The name of the tool that a finished choice has called.
    pub(crate) fn called_tool(&self, output: &ChoiceOutput) -> Option<&str> {
        self.tool.as_deref().filter(|_| output.finish == Some(GenerationFinish::ToolCalls))
    }

    /// The id of a choice's tool call.
    pub(crate) fn call_id(&self, index: usize) -> String {
        format!("call_{:024x}", super::tokens::hash_bytes(format!("{}/{index}", self.id).as_bytes()))
    }

    fn message(&self, index: usize, output: &ChoiceOutput) -> Value {
        let (content, calls) = match self.called_tool(output) {
            None => (json!(output.text), Value::Null),
            Some(name) => (Value::Null, json!([self.tool_call(index, Some(name), &output.text)])),
        };
        let reasoning = Some(&output.reasoning).filter(|reasoning| !reasoning.is_empty());
        match self.protocol {
            SimProtocol::Sglang => {
                json!({"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls})
            }
            SimProtocol::Vllm => json!({
                "role": "assistant", "content": content, "refusal": null, "annotations": null, "audio": null,
                "function_call": null, "tool_calls": if calls.is_null() { json!([]) } else { calls },
                "reasoning": reasoning,
            }),
        }
    }

    fn tool_call(&self, index: usize, name: Option<&str>, arguments: &str) -> Value {
        match name {
            Some(name) => json!({
                "id": self.call_id(index), "index": 0, "type": "function",
                "function": {"name": name, "arguments": arguments},
            }),
            None => json!({"index": 0, "function": {"arguments": arguments}}),
        }
    }

    fn logprobs(&self, ids: &[u32], pieces: &[String]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let each = ids.iter().zip(pieces);
        if self.endpoint == GenerationEndpoint::Chat {
            let content: Vec<Value> = each
                .map(|(id, text)| {
                    json!({"token": text, "bytes": text.as_bytes(), "logprob": logprob(*id), "top_logprobs": []})
                })
                .collect();
            return json!({"content": content});
        }
        let values: Vec<f64> = ids.iter().map(|id| logprob(*id)).collect();
        let mut offset = 0;
        let offsets: Vec<usize> = pieces
            .iter()
            .map(|text| {
                let at = offset;
                offset += text.len();
                at
            })
            .collect();
        json!({"tokens": pieces, "token_logprobs": values, "top_logprobs": null, "text_offset": offsets})
    }

    pub(crate) fn generate_item(&self, index: usize, output: &ChoiceOutput) -> Value {
        let details = match output.cached {
            CachedTokens { device, host, storage } if host + storage > 0 => {
                json!({"device": device, "host": host, "storage": storage})
            }
            _ => Value::Null,
        };
        let id = self.ids.get(index).unwrap_or(&self.id);
        let now = super::stats::unix_s();
        let reason = match &output.finish {
            None => Value::Null,
            // A prefill engine counts the decode engine's tokens, of which it has generated none.
            Some(GenerationFinish::Length) if self.prefill_leg => json!({"type": "length", "length": 0}),
            Some(GenerationFinish::Length) => json!({"type": "length", "length": output.token_ids.len()}),
            Some(GenerationFinish::Stop(matched)) => json!({"type": "stop", "matched": matched}),
            Some(GenerationFinish::ToolCalls) => json!({"type": "stop", "matched": null}),
            Some(GenerationFinish::Abort) => json!({"type": "abort", "message": "Aborted by AbortReq."}),
        };
        let mut meta = json!({
            "id": id, "finish_reason": reason, "prompt_tokens": output.prompt_tokens, "weight_version": "default",
            "num_retractions": 0, "reasoning_tokens": 0, "completion_tokens": output.token_ids.len(),
            "cached_tokens": output.cached.total(), "cached_tokens_details": details, "dp_rank": output.dp_rank,
            "e2e_latency": now - self.started_unix_s, "request_received_ts": self.started_unix_s,
            "response_sent_to_client_ts": now,
        });
        if self.logprobs
            && let Some(meta) = meta.as_object_mut()
        {
            let of = |ids: &[u32]| ids.iter().map(|id| json!([logprob(*id), id, null])).collect::<Vec<_>>();
            let prompt =
                output.logprobs_from.and_then(|from| output.prompt_ids.get(from..)).unwrap_or_default();
            meta.insert("input_token_logprobs".to_owned(), json!(of(prompt)));
            meta.insert("output_token_logprobs".to_owned(), json!(of(&output.token_ids)));
        }
        json!({"text": output.text, "output_ids": output.token_ids, "meta_info": meta})
    }

    fn chunk(&self, choice: Option<Value>) -> Map<String, Value> {
        let object = if self.endpoint == GenerationEndpoint::Chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        self.envelope(object, choice.into_iter().collect())
    }

    fn delta_choice(&self, index: usize, delta: Value, finish: Option<&GenerationFinish>) -> Value {
        let mut value = match self.endpoint {
            GenerationEndpoint::Chat => json!({"index": index, "delta": delta, "logprobs": null}),
            _ => json!({"index": index, "text": delta, "logprobs": null}),
        };
        if let Some(choice) = value.as_object_mut() {
            choice.insert("finish_reason".to_owned(), finish_reason(finish));
            let name = if self.protocol == SimProtocol::Sglang { "matched_stop" } else { "stop_reason" };
            choice.insert(name.to_owned(), matched_stop(finish));
        }
        value
    }

    fn chat_delta(&self, mut delta: Map<String, Value>) -> Value {
        if self.protocol == SimProtocol::Sglang {
            for name in ["role", "content", "reasoning_content", "tool_calls"] {
                delta.entry(name).or_insert(Value::Null);
            }
        }
        Value::Object(delta)
    }

    fn chunk_with_usage_null(&self, choice: Value) -> Value {
        let mut chunk = self.chunk(Some(choice));
        if self.protocol == SimProtocol::Sglang {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(chunk)
    }

    /// Event that opens a choice in a stream.
    pub(crate) fn opening_event(&self, index: usize) -> Option<Value> {
        if self.endpoint != GenerationEndpoint::Chat {
            return None;
        }
        let mut delta = Map::new();
        delta.insert("role".to_owned(), json!("assistant"));
        delta.insert("content".to_owned(), json!(""));
        Some(self.chunk_with_usage_null(self.delta_choice(index, self.chat_delta(delta), None)))
    }

    /// Event that opens the tool call of a choice in a stream.
    pub(crate) fn tool_opening_event(&self, index: usize) -> Value {
        let mut delta = Map::new();
        delta.insert("tool_calls".to_owned(), json!([self.tool_call(index, self.tool.as_deref(), "")]));
        self.chunk_with_usage_null(self.delta_choice(index, self.chat_delta(delta), None))
    }

    /// Event of one token. `so_far` already contains it.
    pub(crate) fn token_event(&self, index: usize, piece: &OutputToken, so_far: &ChoiceOutput) -> Value {
        let mut choice = match self.endpoint {
            GenerationEndpoint::Generate => {
                let mut value = self.generate_item(index, so_far);
                if let Some(value) = value.as_object_mut() {
                    value.insert("index".to_owned(), json!(index));
                }
                return value;
            }
            GenerationEndpoint::Chat => {
                let (name, value) = match piece.part {
                    OutputPart::Reasoning if self.protocol == SimProtocol::Vllm => {
                        ("reasoning", json!(piece.text))
                    }
                    OutputPart::Reasoning => ("reasoning_content", json!(piece.text)),
                    OutputPart::Content => ("content", json!(piece.text)),
                    OutputPart::ToolArguments => {
                        ("tool_calls", json!([self.tool_call(index, None, &piece.text)]))
                    }
                };
                let delta = Map::from_iter([(name.to_owned(), value)]);
                self.delta_choice(index, self.chat_delta(delta), None)
            }
            _ => self.delta_choice(index, json!(piece.text), None),
        };
        if let Some(choice) = choice.as_object_mut() {
            if self.logprobs {
                let logprobs = self.logprobs(&[piece.id], std::slice::from_ref(&piece.text));
                choice.insert("logprobs".to_owned(), logprobs);
            }
            if self.protocol == SimProtocol::Vllm {
                let ids = if self.return_token_ids { json!([piece.id]) } else { Value::Null };
                choice.insert("token_ids".to_owned(), ids);
            }
        }
        self.chunk_with_usage_null(choice)
    }

    /// Event that closes a choice in a stream.
    pub(crate) fn closing_event(&self, index: usize, output: &ChoiceOutput) -> Value {
        match self.endpoint {
            GenerationEndpoint::Generate => {
                let mut value = self.generate_item(index, output);
                if let Some(value) = value.as_object_mut() {
                    value.insert("index".to_owned(), json!(index));
                }
                value
            }
            GenerationEndpoint::Chat => {
                let delta = self.chat_delta(Map::new());
                self.chunk_with_usage_null(self.delta_choice(index, delta, output.finish.as_ref()))
            }
            _ => self.chunk_with_usage_null(self.delta_choice(index, json!(""), output.finish.as_ref())),
        }
    }

    /// The event with the usage.
    pub(crate) fn usage_event(&self, outputs: &[ChoiceOutput]) -> Value {
        let mut chunk = self.chunk(None);
        chunk.insert("usage".to_owned(), self.usage(outputs));
        Value::Object(chunk)
    }
}
