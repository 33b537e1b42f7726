//! Tools of a chat completion's request.

use serde::Serialize;

use crate::json::Members;

#[derive(Debug, Default, Serialize)]
pub(crate) struct ToolSettings<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tools: Vec<ChatTool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_choice: Option<ChatToolChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parallel_tool_calls: Option<bool>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "function")]
pub(crate) struct ChatTool<'a> {
    pub(crate) function: ChatFunctionDefinition<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) defer_loading: Option<bool>,
}

/// Chat templates render these members in this order, which is SGLang's.
#[derive(Debug, Serialize)]
pub(crate) struct ChatFunctionDefinition<'a> {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) parameters: ToolParameters<'a>,
    pub(crate) strict: bool,
}

/// The members of a schema, in the client's order.
#[derive(Debug, Serialize)]
pub(crate) struct ToolParameters<'a> {
    #[serde(flatten)]
    pub(crate) members: Members<'a>,
    /// Last, where SGLang adds it.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) added_type: Option<&'static str>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ChatToolChoice {
    Mode(&'static str),
    Tool(NamedTool),
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "function")]
pub(crate) struct NamedTool {
    function: FunctionName,
}

#[derive(Debug, Serialize)]
struct FunctionName {
    name: String,
}

impl ChatToolChoice {
    pub(crate) fn named(name: String) -> Self {
        Self::Tool(NamedTool { function: FunctionName { name } })
    }
}
