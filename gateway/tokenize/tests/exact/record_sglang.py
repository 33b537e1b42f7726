"""Records what SGLang hands to transformers for each body. Runs where SGLang is installed.

    record_sglang.py TEMPLATE chat < bodies.json > prepared.json
    record_sglang.py TEMPLATE (messages | responses) < messages.json > prepared.json

A body with media has `media`: the types of its parts, which only an engine with a model converts. A body whose chat depends on the
engine's reasoning parser has `configured`.
"""

from types import SimpleNamespace

from recorder import ReasoningParserNeeded, record
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import (
    OpenAIServingChat,
    normalize_assistant_tool_call_arguments,
    normalize_tool_content,
)
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    process_content_for_template_format,
)
from sglang.srt.parser.template_detection import detect_inline_system_support


def of_chat(body: dict, _template: str) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(body)


def needs_parser(*_):
    raise ReasoningParserNeeded


def of_messages(body: dict, template: str) -> ChatCompletionRequest:
    chat = SimpleNamespace(
        supports_inline_system=detect_inline_system_support(template),
        supports_native_reasoning_history=needs_parser,
        apply_reasoning_enabled=needs_parser,
    )
    return AnthropicServing(chat)._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))


def of_responses(body: dict, template: str) -> ChatCompletionRequest:
    serving = object.__new__(OpenAIServingResponses)
    serving.tool_call_parser = None
    serving.supports_inline_system = detect_inline_system_support(template)
    request = ResponsesRequest.model_validate(body)
    tools = serving._response_tools_to_chat_tools(request)
    return ChatCompletionRequest(
        model=request.model,
        messages=serving._construct_input_messages(request),
        tools=tools or None,
        tool_choice=serving._chat_tool_choice(request.effective_tool_choice()) if tools else "none",
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


CHATS = {"chat": of_chat, "messages": of_messages, "responses": of_responses}


def prepare(api: str, body: dict, template: str) -> dict:
    request = CHATS[api](body, template)
    content_format = detect_jinja_template_content_format(template)
    messages, media = [], []
    for message in [message.model_dump() for message in request.messages]:
        normalize_assistant_tool_call_arguments(message)
        if message.get("content") is None:
            message["content"] = ""
        if isinstance(message["content"], list):
            media += [part["type"] for part in message["content"] if part["type"] != "text"]
        message = process_content_for_template_format(message, content_format, [], [], [], [])
        message["content"] = normalize_tool_content(message["role"], message.get("content"))
        messages.append(message)
    if media and api != "chat":
        return {"media": media}
    messages, suffix = OpenAIServingChat._handle_last_assistant_message(None, messages, request)
    tools = None
    if request.tools and request.tool_choice != "none":
        chosen = None if isinstance(request.tool_choice, str) else request.tool_choice.function.name
        tools = [tool.model_dump() for tool in request.tools if chosen in (None, tool.function.name)] or None
    kwargs = {"add_generation_prompt": True}
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    kwargs.update(request.chat_template_kwargs or {})
    return {"messages": messages, "tools": tools, "documents": None, "kwargs": kwargs, "suffix": suffix or ""}


record(prepare)
