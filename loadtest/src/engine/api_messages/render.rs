//! Messages as responses: complete, and as events.

use serde_json::{Value, json};

use super::super::SimProtocol;
use super::super::generation::{GenerationFinish, OutputPart, OutputToken};
use super::super::render::{ChoiceOutput, ResponseRenderer};
use super::super::response;

/// vLLM converts the chunks of its own chat stream. An error among them is no chunk, and its parser's message is sent.
const VLLM_STREAM_ERROR: &str = "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required\nchoices\n  Field required";

/// The whole message.
pub(crate) fn complete_response(renderer: &ResponseRenderer, outputs: &[ChoiceOutput]) -> Value {
    let output = outputs.first().cloned().unwrap_or_default();
    let protocol = renderer.protocol;
    let mut content = Vec::new();
    if !output.reasoning.is_empty() {
        let mut block = json!({"type": "thinking", "thinking": output.reasoning});
        if let Some(signature) = signature(protocol) {
            block["signature"] = signature.into();
        }
        content.push(block);
    }
    match renderer.called_tool(&output) {
        Some(name) => {
            let input: Value = serde_json::from_str(&output.text).unwrap_or_default();
            content
                .push(json!({"type": "tool_use", "id": renderer.call_id(0), "name": name, "input": input}));
        }
        None if !output.text.is_empty() || content.is_empty() => {
            content.push(json!({"type": "text", "text": output.text}));
        }
        None => {}
    }
    let mut message = json!({
        "id": message_id(renderer), "type": "message", "role": "assistant", "content": content,
        "model": renderer.model, "usage": final_usage(renderer, &output),
    });
    let (reason, sequence) = stop_reason(protocol, output.finish.as_ref());
    for (name, value) in [("stop_reason", reason), ("stop_sequence", sequence.as_deref())] {
        if let Some(value) = value {
            message[name] = value.into();
        }
    }
    let params = renderer.finished_transfer_params(outputs);
    if !params.is_null() {
        message["kv_transfer_params"] = params;
    }
    message
}

/// vLLM's messages have the id of the chat completion, SGLang's one of their own.
fn message_id(renderer: &ResponseRenderer) -> String {
    match renderer.protocol {
        SimProtocol::Vllm => renderer.id.clone(),
        SimProtocol::Sglang => format!("msg_{}", response::hex_id()),
    }
}

/// vLLM signs reasoning with a random number, SGLang does not.
fn signature(protocol: SimProtocol) -> Option<String> {
    (protocol == SimProtocol::Vllm).then(response::hex_id)
}

/// Reason and stop sequence. SGLang does not distinguish the end of a turn from a stop sequence.
fn stop_reason(
    protocol: SimProtocol,
    finish: Option<&GenerationFinish>,
) -> (Option<&'static str>, Option<String>) {
    match (finish, protocol) {
        (Some(GenerationFinish::Length), _) => (Some("max_tokens"), None),
        (Some(GenerationFinish::ToolCalls), _) => (Some("tool_use"), None),
        (Some(GenerationFinish::Stop(Some(text))), SimProtocol::Vllm) => {
            (Some("stop_sequence"), Some(text.clone()))
        }
        (Some(GenerationFinish::Stop(_)), _) | (_, SimProtocol::Sglang) => (Some("end_turn"), None),
        (Some(GenerationFinish::Abort) | None, SimProtocol::Vllm) => (None, None),
    }
}

/// Cached tokens are not input tokens. vLLM reports them even if there are none.
fn final_usage(renderer: &ResponseRenderer, output: &ChoiceOutput) -> Value {
    let cached = output.cached.total();
    let mut usage = json!({
        "input_tokens": output.prompt_tokens.saturating_sub(cached), "output_tokens": output.token_ids.len(),
    });
    if cached > 0 || renderer.protocol == SimProtocol::Vllm {
        usage["cache_read_input_tokens"] = cached.into();
    }
    usage
}

/// The events of one message.
pub(crate) struct MessagesStream {
    renderer: ResponseRenderer,
    id: String,
    is_started: bool,
    /// What the open content block contains.
    open_block: Option<OutputPart>,
    block_index: usize,
}

impl MessagesStream {
    pub(crate) fn new(renderer: ResponseRenderer) -> Self {
        let id = message_id(&renderer);
        Self { renderer, id, is_started: false, open_block: None, block_index: 0 }
    }

    /// Events when the prompt is available. SGLang starts the message with its first token.
    pub(crate) fn started(&mut self, output: &ChoiceOutput) -> Vec<Value> {
        match self.renderer.protocol {
            SimProtocol::Vllm => self.start(output),
            SimProtocol::Sglang => Vec::new(),
        }
    }

    fn start(&mut self, output: &ChoiceOutput) -> Vec<Value> {
        if std::mem::replace(&mut self.is_started, true) {
            return Vec::new();
        }
        let mut message = json!({
            "id": self.id, "type": "message", "role": "assistant", "content": [], "model": self.renderer.model,
        });
        match self.renderer.protocol {
            // vLLM has no cached tokens in the first chunk of a chat stream.
            SimProtocol::Vllm => {
                message["stop_reason"] = Value::Null;
                message["stop_sequence"] = Value::Null;
                message["usage"] = json!({"input_tokens": output.prompt_tokens, "output_tokens": 0});
            }
            SimProtocol::Sglang => {
                message["usage"] = final_usage(&self.renderer, output);
                message["usage"]["output_tokens"] = json!(0);
            }
        }
        vec![json!({"type": "message_start", "message": message})]
    }

    pub(crate) fn token(&mut self, piece: &OutputToken, output: &ChoiceOutput) -> Vec<Value> {
        let mut events = self.start(output);
        if piece.text.is_empty() {
            return events;
        }
        if self.open_block != Some(piece.part) {
            events.extend(self.close_block());
            let block = match piece.part {
                OutputPart::Reasoning => json!({"type": "thinking", "thinking": ""}),
                OutputPart::Content => json!({"type": "text", "text": ""}),
                OutputPart::ToolArguments => json!({
                    "type": "tool_use", "id": self.renderer.call_id(0), "name": self.renderer.tool, "input": {},
                }),
            };
            events.push(
                json!({"type": "content_block_start", "index": self.block_index, "content_block": block}),
            );
            self.open_block = Some(piece.part);
        }
        events.push(self.delta(match piece.part {
            OutputPart::Reasoning => json!({"type": "thinking_delta", "thinking": piece.text}),
            OutputPart::Content => json!({"type": "text_delta", "text": piece.text}),
            OutputPart::ToolArguments => json!({"type": "input_json_delta", "partial_json": piece.text}),
        }));
        events
    }

    fn delta(&self, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": self.block_index, "delta": delta})
    }

    fn close_block(&mut self) -> Vec<Value> {
        let Some(part) = self.open_block.take() else { return Vec::new() };
        let mut events = Vec::new();
        if let Some(signature) = signature(self.renderer.protocol).filter(|_| part == OutputPart::Reasoning) {
            events.push(self.delta(json!({"type": "signature_delta", "signature": signature})));
        }
        events.push(json!({"type": "content_block_stop", "index": self.block_index}));
        self.block_index += 1;
        events
    }

    /// Events at the end of the generation.
    pub(crate) fn finished(&mut self, output: &ChoiceOutput) -> Vec<Value> {
        let mut events = self.start(output);
        events.extend(self.close_block());
        let (reason, sequence) = stop_reason(self.renderer.protocol, output.finish.as_ref());
        events.push(match self.renderer.protocol {
            SimProtocol::Vllm => json!({
                "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": final_usage(&self.renderer, output),
            }),
            SimProtocol::Sglang => json!({
                "type": "message_delta", "delta": {"stop_reason": reason},
                "usage": {"output_tokens": output.token_ids.len()},
            }),
        });
        events.push(json!({"type": "message_stop"}));
        events
    }

    /// Events of a failure, which ends the stream.
    pub(crate) fn failed(&mut self, message: &str) -> Vec<Value> {
        let error =
            |kind: &str, message: &str| json!({"type": "error", "error": {"type": kind, "message": message}});
        match self.renderer.protocol {
            SimProtocol::Vllm => vec![error("internal_error", VLLM_STREAM_ERROR)],
            SimProtocol::Sglang => {
                let mut events = self.start(&ChoiceOutput::default());
                events.extend(self.close_block());
                events.push(error("api_error", message));
                events.push(json!({"type": "message_stop"}));
                events
            }
        }
    }
}
