//! The response object.

use serde_json::{Value, json};

use super::super::SimProtocol;
use super::super::generation::GenerationFinish;
use super::super::render::{ChoiceOutput, ResponseRenderer};
use super::{ResponsesRequest, items};

/// The whole response.
pub(crate) fn complete_response(
    renderer: &ResponseRenderer,
    request: &ResponsesRequest,
    outputs: &[ChoiceOutput],
) -> Value {
    let output = outputs.first().cloned().unwrap_or_default();
    let items = items::of_output(renderer, &output, request.wants_summary());
    request.finished_object(renderer, items, &output)
}

/// How a generation ended. vLLM reports an aborted one as completed.
fn status(protocol: SimProtocol, finish: Option<&GenerationFinish>) -> &'static str {
    match finish {
        Some(GenerationFinish::Length) => "incomplete",
        Some(GenerationFinish::Abort) if protocol == SimProtocol::Sglang => "failed",
        _ => "completed",
    }
}

fn usage(protocol: SimProtocol, output: &ChoiceOutput) -> Value {
    let (input, generated) = (output.prompt_tokens, output.token_ids.len());
    let mut usage = json!({
        "input_tokens": input, "output_tokens": generated, "total_tokens": input + generated,
        "input_tokens_details": {"cached_tokens": output.cached.total(), "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
    });
    if protocol == SimProtocol::Vllm {
        for (details, turns) in [
            ("input_tokens_details", ["input_tokens_per_turn", "cached_tokens_per_turn"]),
            ("output_tokens_details", ["output_tokens_per_turn", "tool_output_tokens_per_turn"]),
        ] {
            for turn in turns {
                usage[details][turn] = json!([]);
            }
        }
        usage["output_tokens_details"]["tool_output_tokens"] = json!(0);
    }
    usage
}

/// `defaults` with the members that `value` has.
fn with_defaults(mut defaults: Value, value: &Value) -> Value {
    if let (Some(members), Some(set)) = (defaults.as_object_mut(), value.as_object()) {
        members.extend(set.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    defaults
}

impl ResponsesRequest {
    /// Whether the client asked for a summary of the reasoning, which vLLM does not have.
    pub(super) fn wants_summary(&self) -> bool {
        let summary = self.body.get("reasoning").and_then(|reasoning| reasoning.get("summary"));
        self.protocol == SimProtocol::Sglang && summary.is_some_and(|summary| !summary.is_null())
    }

    /// A member of the body, `default` if it is missing or null.
    fn member(&self, name: &str, default: Value) -> Value {
        self.body.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default)
    }

    pub(super) fn tools(&self) -> Vec<Value> {
        let defaults = match self.protocol {
            SimProtocol::Vllm => json!({"allowed_callers": null, "async": null, "defer_loading": null,
                "description": null, "output_schema": null, "parameters": null, "strict": null}),
            SimProtocol::Sglang => json!({"defer_loading": null, "description": null, "format": null,
                "parameters": null, "strict": false, "tools": null}),
        };
        let tools = self.body.get("tools").and_then(Value::as_array).into_iter().flatten();
        tools.map(|tool| with_defaults(defaults.clone(), tool)).collect()
    }

    /// The response with its output.
    pub(super) fn finished_object(
        &self,
        renderer: &ResponseRenderer,
        items: Vec<Value>,
        output: &ChoiceOutput,
    ) -> Value {
        let status = status(self.protocol, output.finish.as_ref());
        let mut object = self.object(&renderer.model, status, items, Some(output));
        match (self.protocol, status) {
            (SimProtocol::Vllm, _) => {
                let outputs = std::slice::from_ref(output);
                object["kv_transfer_params"] = renderer.finished_transfer_params(outputs);
            }
            (SimProtocol::Sglang, "failed") => {
                object["error"] = json!({"code": "server_error", "message": "Aborted by AbortReq."});
            }
            (SimProtocol::Sglang, _) => {}
        }
        object
    }

    /// The response with a status. Without `output`, there is no usage.
    pub(super) fn object(
        &self,
        model: &str,
        status: &str,
        items: Vec<Value>,
        output: Option<&ChoiceOutput>,
    ) -> Value {
        let text_only = !items.is_empty() && items.iter().all(|item| item["type"] == "message");
        let details = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let common = json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": model, "output": items,
            "status": status, "usage": output.map(|output| usage(self.protocol, output)),
            "incomplete_details": details, "tools": self.tools(),
            "instructions": self.body.get("instructions"), "user": self.body.get("user"),
            "previous_response_id": self.body.get("previous_response_id"),
            "parallel_tool_calls": self.member("parallel_tool_calls", json!(true)),
            "truncation": self.member("truncation", json!("disabled")),
        });
        let own = match self.protocol {
            SimProtocol::Vllm => self.vllm_members(output),
            SimProtocol::Sglang => self.sglang_members(text_only),
        };
        with_defaults(own, &common)
    }

    fn vllm_members(&self, output: Option<&ChoiceOutput>) -> Value {
        let reasoning = self.body.get("reasoning").filter(|reasoning| !reasoning.is_null());
        let unset =
            json!({"context": null, "effort": null, "generate_summary": null, "mode": null, "summary": null});
        let choice = self.member("tool_choice", json!("auto"));
        // Without tools, none can be chosen.
        let no_tools = self.tools().is_empty() && choice.is_string();
        let room = self.context_tokens.saturating_sub(output.map_or(0, |output| output.prompt_tokens));
        json!({
            "metadata": self.body.get("metadata"), "prompt": null,
            "temperature": self.member("temperature", json!(1.0)), "top_p": self.member("top_p", json!(1.0)),
            "tool_choice": if no_tools { json!("none") } else { choice },
            "background": self.flag("background"), "max_tool_calls": self.body.get("max_tool_calls"),
            "max_output_tokens": self.member("max_output_tokens", json!(room)),
            "reasoning": reasoning.map(|reasoning| with_defaults(unset, reasoning)),
            "service_tier": self.member("service_tier", json!("auto")), "text": self.body.get("text"),
            "top_logprobs": null, "presence_penalty": self.member("presence_penalty", json!(0.0)),
            "frequency_penalty": self.member("frequency_penalty", json!(0.0)),
            "kv_transfer_params": null, "ec_transfer_params": null, "input_messages": null,
            "output_messages": null,
        })
    }

    fn sglang_members(&self, text_only: bool) -> Value {
        let effort = self.body.get("reasoning").and_then(|reasoning| reasoning.get("effort"));
        let text = if text_only { json!({"format": {"type": "text"}}) } else { Value::Null };
        json!({
            "error": null, "tool_choice": self.member("tool_choice", json!("auto")),
            "max_output_tokens": self.body.get("max_output_tokens"),
            "reasoning": {"effort": effort, "summary": null}, "store": self.member("store", json!(true)),
            "temperature": self.body.get("temperature"), "top_p": self.body.get("top_p"),
            "text": self.member("text", text), "metadata": self.member("metadata", json!({})),
        })
    }
}
