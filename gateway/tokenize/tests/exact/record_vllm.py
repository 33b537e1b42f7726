"""Records what vLLM hands to transformers for each body. Runs where vLLM is installed.

    record_vllm.py TEMPLATE chat < bodies.json > prepared.json
    record_vllm.py TEMPLATE (messages | responses) < messages.json > prepared.json

A body with media has `media`: the types of its parts, which only an engine with a model converts.
"""

from types import SimpleNamespace

from recorder import record
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages
from vllm.renderers.hf import (
    _consolidate_system_messages,
    _convert_developer_to_system,
    _detect_content_format,
    _detect_developer_role_support,
)

CONFIG = SimpleNamespace(
    multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=False, max_model_len=1 << 20
)


def of_chat(request: ChatCompletionRequest):
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return request, request.messages, tools


def of_messages(body: dict, template: str):
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body),
        merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
    )
    return of_chat(request)


def of_responses(body: dict):
    request = ResponsesRequest.model_validate(body)
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return request, messages, construct_tool_dicts(request.tools, request.tool_choice)


def prepare(api: str, body: dict, template: str) -> dict:
    if api == "chat":
        request, messages, tools = of_chat(ChatCompletionRequest.model_validate(body))
    else:
        request, messages, tools = of_messages(body, template) if api == "messages" else of_responses(body)
    if api != "chat" and has_non_text_content(messages):
        return {"media": [part["type"] for message in messages if isinstance(message.get("content"), list) for part in message["content"]]}
    content_format = _detect_content_format(template, default="string")
    conversation, _, _ = parse_chat_messages(messages, CONFIG, content_format)
    kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
    documents = kwargs.pop("documents", None)
    if api == "chat":
        return {"messages": conversation, "tools": tools, "documents": documents, "kwargs": kwargs}
    if any(message["role"] == "developer" for message in conversation) and not _detect_developer_role_support(template):
        conversation = _consolidate_system_messages(_convert_developer_to_system(conversation))
    special = request.build_tok_params(CONFIG).add_special_tokens
    return {"messages": conversation, "tools": tools, "documents": documents, "kwargs": kwargs, "special": special}


record(prepare)
