"""Writes vectors.json: Messages bodies, and the chat completions that SGLang 0.5.23 converts them to.

    python vectors.py > vectors.json      in an environment with sglang 0.5.23
    python vectors.py --bodies > BODIES   the bodies, one a line, whose inline system messages are merged
    cargo run -p moongate-translate --example messages_to_chat < BODIES > CHATS
    python vectors.py --compare < CHATS   SGLang reads each as the request that its own conversion makes

The chat handler is replaced where it would need a model: reasoning has a member of its own, and thinking has both template arguments.
"""

import json
import logging
import sys
from types import SimpleNamespace

logging.disable(logging.CRITICAL)

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing  # noqa: E402
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: E402

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
LINK = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
CACHE = {"type": "ephemeral"}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "celsius": {"type": "boolean", "default": True}},
        "required": ["place"],
    },
}
CLOCK = {"type": "custom", "name": "clock", "input_schema": {"properties": {}}}
SEARCH = {
    "type": "search_result",
    "source": "https://example.com",
    "title": "Example",
    "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}],
}


def text(value):
    return {"type": "text", "text": value}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def use(number, name="get_weather", **arguments):
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


def result(number, content=None):
    block = {"type": "tool_result", "tool_use_id": f"toolu_{number}"}
    return block if content is None else {**block, "content": content}


def body(*messages, **members):
    return {"model": "m", "max_tokens": 100, "messages": list(messages), **members}


def called(*results):
    """A conversation in which a tool is called, and these blocks follow."""
    return body(user("Weather?"), assistant([use(1, place="Zürich")]), user(list(results)), tools=[WEATHER])


def schema(**members):
    return {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"z": {}, "a": {}}}}, **members}


HELLO = user("Hello")
BODIES = {
    "plain": body(HELLO),
    "several turns": body(HELLO, assistant("Hi"), user("How are you?")),
    "system": body(HELLO, system="Be brief."),
    "blank system": body(HELLO, system=" \n"),
    "system with space": body(HELLO, system="  Be brief.  "),
    "system blocks": body(HELLO, system=[{**text("Be brief."), "cache_control": CACHE}, text(""), text("Be kind.")]),
    "inline system": body(HELLO, assistant("Hi"), {"role": "system", "content": " Be brief. "}, user("Go on"), system="A"),
    "inline system blocks": body(HELLO, {"role": "system", "content": [text(" a "), text(" "), text("b")]}, user("Go on")),
    "one text block": body(user([text("Hello")])),
    "text blocks": body(user([text("Hello"), text("there")])),
    "empty text block": body(HELLO, assistant([text("")]), user("Go on")),
    "no blocks": body(user([]), assistant([]), HELLO),
    "image": body(user([text("What is this?"), IMAGE])),
    "image alone": body(user([LINK])),
    "images in turns": body(user([IMAGE, text("And"), LINK]), assistant("A pixel"), user("Why?")),
    "search result": body(user([SEARCH, text("What does it say?")])),
    "empty search result": body(user([{"type": "search_result", "content": []}, text("?")])),
    "thinking": body(HELLO, assistant([{"type": "thinking", "thinking": "Hm", "signature": "s"}, text("Hi")]), user("Go on")),
    "two thoughts": body(
        HELLO,
        assistant([{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": ""}, {"type": "thinking", "thinking": "b"}]),
        user("Go on"),
    ),
    "thinking and tools": body(
        HELLO,
        assistant([{"type": "thinking", "thinking": "Use it"}, text("Wait"), use(1, place="Bern"), use(2, place="Basel")]),
        user([result(1, "rain"), result(2, "sun"), text("So?")]),
        tools=[WEATHER],
    ),
    "call alone": called(result(1, "sun")),
    "call without input": body(HELLO, assistant([use(1, "clock")]), user([result(1)]), tools=[CLOCK]),
    "call with numbers": body(
        HELLO,
        assistant([use(1, "f", a=1.0, b=1e22, c=1.5e-7, d=-0.0, e=12345678901234567890, f=[True, None, {"k": "é\u2028😀\x7f\"\\"}])]),
        user([result(1, "")]),
    ),
    "result with error": called({**result(1, "no such place"), "is_error": True}),
    "result blocks": called(result(1, [text("rain"), text(""), text("sun")])),
    "result of one block": called(result(1, [text("rain")])),
    "result without blocks": called(result(1, [])),
    "result with image": called(result(1, [text("see"), IMAGE])),
    "result with search": called(result(1, [SEARCH, LINK])),
    "result with references": called(
        result(1, [text("found"), {"type": "tool_reference", "tool_name": "a"}, {"type": "tool_reference", "name": "b"}, text("all")])
    ),
    "texts around results": called(text("before"), result(1, "sun"), text("between"), IMAGE, result(1, "rain"), text("after")),
    "tools": body(HELLO, tools=[WEATHER, CLOCK]),
    "strict and deferred": body(HELLO, tools=[{**WEATHER, "strict": True, "cache_control": CACHE}, {**CLOCK, "defer_loading": True}]),
    "tool choice auto": body(HELLO, tools=[WEATHER], tool_choice={"type": "auto"}),
    "tool choice any": body(HELLO, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    "tool choice tool": body(HELLO, tools=[WEATHER, CLOCK], tool_choice={"type": "tool", "name": "clock"}),
    "tool choice none": body(HELLO, tools=[WEATHER], tool_choice={"type": "none"}),
    "choice without tools": body(HELLO, tool_choice={"type": "auto"}),
    "no tools": body(HELLO, tools=[]),
    "sampling": body(HELLO, temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END", "\n\n"]),
    "zero temperature": body(HELLO, temperature=0.0, stop_sequences=[]),
    "streamed": body(HELLO, stream=True),
    "not streamed": body(HELLO, stream=False),
    "thinking on": body(HELLO, thinking={"type": "enabled", "budget_tokens": 2048}),
    "thinking off": body(HELLO, thinking={"type": "disabled"}),
    "thinking adaptive": body(HELLO, thinking={"type": "adaptive", "display": "omitted"}),
    "structured output": body(HELLO, output_config=schema()),
    "thinking and effort": body(HELLO, thinking={"type": "adaptive"}, output_config=schema(effort="xhigh")),
    "betas": body(HELLO, betas=["x-2025-01-01"], system="A"),
    "null members": body(HELLO, system=None, tools=None, tool_choice=None, temperature=None, thinking=None, stop_sequences=None),
    "pair": body(HELLO, bootstrap_host="10.0.0.1", bootstrap_port=8998, bootstrap_room=7, routed_dp_rank=1),
}


class ChatHandler(SimpleNamespace):
    def supports_native_reasoning_history(self):
        return True

    def apply_reasoning_enabled(self, request, enabled):
        request.chat_template_kwargs = {"thinking": enabled, "enable_thinking": enabled}


def convert(request, keeps_inline_system):
    serving = AnthropicServing(ChatHandler(supports_inline_system=keeps_inline_system))
    return serving._convert_to_chat_completion_request(AnthropicMessagesRequest(**json.loads(json.dumps(request))))


def dump(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def vectors():
    for name, request in BODIES.items():
        for keeps in [False, True] if "inline" in name else [False]:
            yield name, keeps, request, convert(request, keeps)


def members(chat):
    """What the client sent, or the conversion set."""
    dumped = {name: value for name, value in chat.model_dump(mode="json", by_alias=True, exclude_unset=True).items() if value is not None}
    for tool in dumped.get("tools", []):
        # The class copies it to the function.
        tool["function"].pop("defer_loading", None)
        if tool["defer_loading"] is None:
            del tool["defer_loading"]
    return dumped


def merged():
    return [vector for vector in vectors() if not vector[1]]


def compare(lines):
    count = 0
    for line, (name, _, _, expected) in zip(lines, merged(), strict=True):
        found = ChatCompletionRequest(**json.loads(line)).model_dump(mode="json")
        assert dump(found) == dump(expected.model_dump(mode="json")), f"{name}\n{dump(found)}\n{dump(expected.model_dump(mode='json'))}"
        count += 1
    print(f"{count} bodies are the same")


if __name__ == "__main__":
    if "--compare" in sys.argv:
        compare(sys.stdin.read().splitlines())
    elif "--bodies" in sys.argv:
        print("\n".join(dump(request) for _, _, request, _ in merged()))
    else:
        lines = [
            dump({"name": name, "keeps_inline_system": keeps, "messages": request, "chat": members(chat)})
            for name, keeps, request, chat in vectors()
        ]
        print("[\n" + ",\n".join(lines) + "\n]")
