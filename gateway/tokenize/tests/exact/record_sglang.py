"""Records what SGLang hands to transformers for each body. Runs where SGLang is installed.

    record_sglang.py TEMPLATE < bodies.json > prepared.json
"""

import json
import sys
from pathlib import Path

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import (
    OpenAIServingChat,
    normalize_assistant_tool_call_arguments,
    normalize_tool_content,
)
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    process_content_for_template_format,
)


def prepare(body: dict, template: str) -> dict:
    request = ChatCompletionRequest.model_validate(body)
    content_format = detect_jinja_template_content_format(template)
    messages = []
    for message in [message.model_dump() for message in request.messages]:
        normalize_assistant_tool_call_arguments(message)
        if message.get("content") is None:
            message["content"] = ""
        message = process_content_for_template_format(message, content_format, [], [], [], [])
        message["content"] = normalize_tool_content(message["role"], message.get("content"))
        messages.append(message)
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


def main(template: str) -> None:
    out = []
    for case in json.load(sys.stdin):
        try:
            out.append(prepare(case["body"], template))
        except Exception as error:
            out.append({"refused": type(error).__name__})
    json.dump(out, sys.stdout, ensure_ascii=False, indent=1)
    print()


main(Path(sys.argv[1]).read_text())
