//! Output items.

use serde::Serialize;

#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Reasoning {
        id: String,
        /// The text itself is the content.
        summary: [(); 0],
        content: Vec<OutputPart>,
        status: &'static str,
    },
    Message {
        id: String,
        role: &'static str,
        content: Vec<OutputPart>,
        status: &'static str,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        /// JSON, as the model wrote it.
        arguments: String,
        status: &'static str,
    },
}

#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputPart {
    OutputText { text: String, annotations: [(); 0], logprobs: [(); 0] },
    ReasoningText { text: String },
}

impl OutputPart {
    pub(super) fn output(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: [] }
    }
}

impl OutputItem {
    pub(super) fn reasoning(id: String, text: String, status: &'static str) -> Self {
        Self::Reasoning { id, summary: [], content: vec![OutputPart::ReasoningText { text }], status }
    }

    pub(super) fn message(id: String, text: String, status: &'static str) -> Self {
        Self::Message { id, role: "assistant", content: vec![OutputPart::output(text)], status }
    }
}
