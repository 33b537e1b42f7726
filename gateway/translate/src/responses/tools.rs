//! Tools and the choice among them.

use crate::chat::{ChatFunctionDefinition, ChatTool, ChatToolChoice, ToolParameters, ToolSettings};
use crate::error::Untranslatable;
use crate::json::{JsonObject, Members, array, text};

pub(super) fn convert_tools<'a>(request: &mut JsonObject<'a>) -> Result<ToolSettings<'a>, Untranslatable> {
    let tools: Vec<ChatTool<'a>> = match request.take("tools") {
        None => Vec::new(),
        Some(tools) => array(tools, "tools")?
            .into_iter()
            .enumerate()
            .map(|(at, tool)| convert_tool(JsonObject::read(tool, format!("tools[{at}]"))?))
            .collect::<Result<_, _>>()?,
    };
    let parallel_tool_calls = request.parsed("parallel_tool_calls")?.filter(|_| !tools.is_empty());
    let tool_choice = convert_choice(request, &tools)?;
    Ok(ToolSettings { tools, tool_choice, parallel_tool_calls })
}

fn convert_tool(mut tool: JsonObject<'_>) -> Result<ChatTool<'_>, Untranslatable> {
    let kind = tool.required_text("type")?;
    if kind != "function" {
        let reason = format!("a tool of type `{kind}` needs OpenAI's servers; define it as a `function`");
        return Err(Untranslatable::unsupported(tool.path(), reason));
    }
    let members: Option<Members<'_>> = tool.parsed("parameters")?;
    let converted = ChatTool {
        function: ChatFunctionDefinition {
            name: tool.required_text("name")?,
            description: tool.text("description")?,
            parameters: members.map(|members| ToolParameters { members, added_type: None }),
            strict: tool.parsed("strict")?,
        },
        defer_loading: tool.parsed("defer_loading")?,
    };
    tool.reject_rest()?;
    Ok(converted)
}

fn convert_choice(
    request: &mut JsonObject<'_>,
    tools: &[ChatTool<'_>],
) -> Result<Option<ChatToolChoice>, Untranslatable> {
    let Some(choice) = request.take("tool_choice") else { return Ok(None) };
    if let Some(mode) = text(choice, "tool_choice")? {
        return match mode.as_str() {
            "none" => Ok(Some(ChatToolChoice::Mode("none"))),
            "auto" => Ok((!tools.is_empty()).then_some(ChatToolChoice::Mode("auto"))),
            "required" if tools.is_empty() => Err(Untranslatable::Missing { member: "tools".to_owned() }),
            "required" => Ok(Some(ChatToolChoice::Mode("required"))),
            _ => Err(Untranslatable::invalid("tool_choice", "`none`, `auto`, `required` or a function")),
        };
    }
    let mut choice = JsonObject::read(choice, "tool_choice".to_owned())?;
    if choice.required_text("type")? != "function" {
        return Err(Untranslatable::unsupported("tool_choice", "only a `function` can be chosen"));
    }
    let name = choice.required_text("name")?;
    choice.reject_rest()?;
    if !tools.iter().any(|tool| tool.function.name == name) {
        return Err(Untranslatable::invalid("tool_choice.name", "the name of one of `tools`"));
    }
    Ok(Some(ChatToolChoice::named(name)))
}
