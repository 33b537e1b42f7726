//! Tools and the choice among them.

use crate::chat::{ChatFunctionDefinition, ChatTool, ChatToolChoice, ToolParameters, ToolSettings};
use crate::error::Untranslatable;
use crate::json::{JsonObject, Members, array};

pub(super) fn convert_tools<'a>(request: &mut JsonObject<'a>) -> Result<ToolSettings<'a>, Untranslatable> {
    let tools = match request.take("tools") {
        None => Vec::new(),
        Some(tools) => array(tools, "tools")?
            .into_iter()
            .enumerate()
            .map(|(at, tool)| convert_tool(JsonObject::read(tool, format!("tools[{at}]"))?))
            .collect::<Result<_, _>>()?,
    };
    let Some(mut choice) = request.object("tool_choice")? else {
        let tool_choice = (!tools.is_empty()).then_some(ChatToolChoice::Mode("auto"));
        return Ok(ToolSettings { tools, tool_choice, parallel_tool_calls: None });
    };
    let parallel_tool_calls = Some(!choice.parsed("disable_parallel_tool_use")?.unwrap_or(false));
    let tool_choice = convert_choice(&mut choice, &tools)?;
    choice.reject_rest()?;
    Ok(ToolSettings { tools, tool_choice, parallel_tool_calls })
}

fn convert_tool(mut tool: JsonObject<'_>) -> Result<ChatTool<'_>, Untranslatable> {
    let kind = tool.text("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let reason =
            format!("a tool of type `{kind}` runs on Anthropic's servers; define it with an `input_schema`");
        return Err(Untranslatable::unsupported(tool.path_of("type"), reason));
    }
    // How soon the input is streamed is the engine's choice.
    tool.ignore(&["cache_control", "eager_input_streaming"]);
    check_callers(&mut tool)?;
    let converted = ChatTool {
        function: ChatFunctionDefinition {
            name: tool.required_text("name")?,
            // As SGLang writes them: chat templates render both.
            description: tool.text("description")?.unwrap_or_default(),
            parameters: input_schema(&mut tool)?,
            strict: tool.parsed("strict")?.unwrap_or(false),
        },
        defer_loading: tool.parsed("defer_loading")?,
    };
    tool.reject_rest()?;
    Ok(converted)
}

/// Only the model itself can call a tool.
fn check_callers(tool: &mut JsonObject<'_>) -> Result<(), Untranslatable> {
    let callers: Vec<String> = tool.parsed("allowed_callers")?.unwrap_or_default();
    if callers.iter().any(|caller| caller != "direct") {
        return Err(Untranslatable::unsupported(
            tool.path_of("allowed_callers"),
            "only `direct` calls are possible",
        ));
    }
    Ok(())
}

/// The schema; without a type it is an object's.
fn input_schema<'a>(tool: &mut JsonObject<'a>) -> Result<ToolParameters<'a>, Untranslatable> {
    let path = tool.path_of("input_schema");
    let members: Members<'a> =
        tool.parsed("input_schema")?.ok_or(Untranslatable::Missing { member: path })?;
    let has_type = members.0.iter().any(|(name, _)| name == "type");
    Ok(ToolParameters { members, added_type: (!has_type).then_some("object") })
}

fn convert_choice(
    choice: &mut JsonObject<'_>,
    tools: &[ChatTool<'_>],
) -> Result<Option<ChatToolChoice>, Untranslatable> {
    let mode = match choice.required_text("type")?.as_str() {
        "none" => return Ok(Some(ChatToolChoice::Mode("none"))),
        "auto" => return Ok((!tools.is_empty()).then_some(ChatToolChoice::Mode("auto"))),
        "any" if !tools.is_empty() => ChatToolChoice::Mode("required"),
        "tool" => {
            let name = choice.required_text("name")?;
            if !tools.iter().any(|tool| tool.function.name == name) {
                return Err(Untranslatable::invalid("tool_choice.name", "the name of one of `tools`"));
            }
            ChatToolChoice::named(name)
        }
        "any" => return Err(Untranslatable::Missing { member: "tools".to_owned() }),
        _ => return Err(Untranslatable::invalid("tool_choice.type", "`auto`, `any`, `tool` or `none`")),
    };
    Ok(Some(mode))
}
