//! Events of a response. Both engines send them without `[DONE]`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::SimProtocol;
use super::super::generation::{OutputPart, OutputToken};
use super::super::render::{ChoiceOutput, ResponseRenderer};
use super::{ResponsesRequest, items};

/// An output item whose text is not complete.
struct OpenItem {
    part: OutputPart,
    id: String,
    text: String,
}

/// The events of one response.
pub(crate) struct ResponsesStream {
    renderer: ResponseRenderer,
    request: Arc<ResponsesRequest>,
    /// Number of the next event.
    sequence: u64,
    open: Option<OpenItem>,
    finished_items: Vec<Value>,
    /// SGLang holds a message back until it is clear that no tool call follows.
    holds_messages: bool,
    held: Vec<Value>,
}

impl ResponsesStream {
    pub(crate) fn new(renderer: ResponseRenderer, request: Arc<ResponsesRequest>) -> Self {
        let can_call = request.text("tool_choice") != Some("none") && !request.tools().is_empty();
        Self {
            holds_messages: can_call && renderer.protocol == SimProtocol::Sglang,
            renderer,
            request,
            sequence: 0,
            open: None,
            finished_items: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Events before the prompt is computed.
    pub(crate) fn opened(&mut self) -> Vec<Value> {
        let object = self.request.object(&self.renderer.model, "in_progress", Vec::new(), None);
        let mut events = Vec::new();
        for name in ["response.created", "response.in_progress"] {
            self.push(&mut events, name, json!({"response": object}));
        }
        events
    }

    /// Numbers an event and appends it.
    fn push(&mut self, events: &mut Vec<Value>, name: &str, mut event: Value) {
        event["type"] = json!(name);
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        let is_message = self.open.as_ref().is_some_and(|item| item.part == OutputPart::Content);
        if self.holds_messages && (is_message || !self.held.is_empty()) {
            self.held.push(event);
        } else {
            events.push(event);
        }
    }

    /// Appends an event of the open item.
    fn push_of_item(&mut self, events: &mut Vec<Value>, name: &str, mut event: Value) {
        if let Some(item) = &self.open {
            event["item_id"] = json!(item.id);
            event["output_index"] = json!(self.finished_items.len());
            self.push(events, name, event);
        }
    }

    pub(crate) fn token(&mut self, piece: &OutputToken) -> Vec<Value> {
        let mut events = Vec::new();
        if piece.text.is_empty() {
            return events;
        }
        if self.open.as_ref().is_none_or(|item| item.part != piece.part) {
            self.close_item(&mut events);
            self.open_item(&mut events, piece.part);
        }
        if let Some(item) = &mut self.open {
            item.text.push_str(&piece.text);
        }
        let (name, event) = match piece.part {
            OutputPart::Reasoning if self.request.wants_summary() => {
                ("response.reasoning_summary_text.delta", json!({"delta": piece.text, "summary_index": 0}))
            }
            OutputPart::Reasoning => {
                ("response.reasoning_text.delta", json!({"delta": piece.text, "content_index": 0}))
            }
            OutputPart::Content => (
                "response.output_text.delta",
                json!({"delta": piece.text, "content_index": 0, "logprobs": []}),
            ),
            OutputPart::ToolArguments => {
                ("response.function_call_arguments.delta", json!({"delta": piece.text}))
            }
        };
        self.push_of_item(&mut events, name, event);
        events
    }

    fn tool_name(&self) -> &str {
        self.renderer.tool.as_deref().unwrap_or_default()
    }

    fn open_item(&mut self, events: &mut Vec<Value>, part: OutputPart) {
        let protocol = self.renderer.protocol;
        let prefix = match part {
            OutputPart::Reasoning => "rs",
            OutputPart::Content => "msg",
            OutputPart::ToolArguments => "fc",
        };
        let id = items::new_id(protocol, prefix);
        let item = match part {
            OutputPart::Reasoning => items::reasoning(protocol, &id, None, false, Some("in_progress")),
            OutputPart::Content => items::message(protocol, &id, None),
            OutputPart::ToolArguments => {
                items::function_call(protocol, &id, &self.renderer.call_id(0), self.tool_name(), None)
            }
        };
        self.open = Some(OpenItem { part, id, text: String::new() });
        let added = json!({"item": item, "output_index": self.finished_items.len()});
        self.push(events, "response.output_item.added", added);
        let (name, event) = match part {
            OutputPart::Reasoning if self.request.wants_summary() => (
                "response.reasoning_summary_part.added",
                json!({"summary_index": 0, "part": {"type": "summary_text", "text": ""}}),
            ),
            OutputPart::Reasoning => (
                "response.content_part.added",
                json!({"content_index": 0, "part": {"type": "reasoning_text", "text": ""}}),
            ),
            OutputPart::Content => {
                let logprobs = if protocol == SimProtocol::Vllm { json!([]) } else { Value::Null };
                let part = items::output_text("", &logprobs);
                ("response.content_part.added", json!({"content_index": 0, "part": part}))
            }
            OutputPart::ToolArguments => return,
        };
        self.push_of_item(events, name, event);
    }

    fn close_item(&mut self, events: &mut Vec<Value>) {
        let Some(OpenItem { part, id, text }) = &self.open else { return };
        let (protocol, with_summary) = (self.renderer.protocol, self.request.wants_summary());
        let item = match part {
            OutputPart::Reasoning => {
                items::reasoning(protocol, id, Some(text), with_summary, Some("completed"))
            }
            OutputPart::Content => items::message(protocol, id, Some(text)),
            OutputPart::ToolArguments => {
                items::function_call(protocol, id, &self.renderer.call_id(0), self.tool_name(), Some(text))
            }
        };
        let done = match part {
            OutputPart::Reasoning if with_summary => vec![
                ("response.reasoning_summary_text.done", json!({"summary_index": 0, "text": text})),
                (
                    "response.reasoning_summary_part.done",
                    json!({"summary_index": 0, "part": {"type": "summary_text", "text": text}}),
                ),
            ],
            OutputPart::Reasoning => vec![
                ("response.reasoning_text.done", json!({"content_index": 0, "text": text})),
                (
                    "response.content_part.done",
                    json!({"content_index": 0, "part": {"type": "reasoning_text", "text": text}}),
                ),
            ],
            OutputPart::Content => vec![
                ("response.output_text.done", json!({"content_index": 0, "text": text, "logprobs": []})),
                (
                    "response.content_part.done",
                    json!({"content_index": 0, "part": items::output_text(text, &Value::Null)}),
                ),
            ],
            OutputPart::ToolArguments => vec![(
                "response.function_call_arguments.done",
                json!({"arguments": text, "name": self.tool_name()}),
            )],
        };
        for (name, event) in done {
            self.push_of_item(events, name, event);
        }
        let event = json!({"item": item, "output_index": self.finished_items.len()});
        self.push(events, "response.output_item.done", event);
        self.open = None;
        self.finished_items.push(item);
    }

    /// Events at the end of the generation. vLLM's last one is the same for an incomplete response.
    pub(crate) fn finished(&mut self, output: &ChoiceOutput) -> Vec<Value> {
        let mut events = Vec::new();
        self.close_item(&mut events);
        let object = self.request.finished_object(&self.renderer, self.finished_items.clone(), output);
        self.request.store_finished(&object);
        let name = match self.renderer.protocol {
            SimProtocol::Vllm => "response.completed".to_owned(),
            SimProtocol::Sglang => format!("response.{}", object["status"].as_str().unwrap_or_default()),
        };
        self.push(&mut events, &name, json!({"response": object}));
        events.append(&mut self.held);
        events
    }

    /// Events of a failure. `None` with vLLM: its error is not one of this API's events, which breaks its stream.
    pub(crate) fn failed(&mut self, message: &str) -> Option<Vec<Value>> {
        if self.renderer.protocol == SimProtocol::Vllm {
            return None;
        }
        let mut object = self.request.object(&self.renderer.model, "failed", Vec::new(), None);
        object["error"] = json!({"code": "server_error", "message": message});
        let mut events = Vec::new();
        self.push(&mut events, "response.failed", json!({"response": object}));
        events.splice(0..0, self.held.drain(..));
        Some(events)
    }
}
