"""Sessions of agents, in the shapes of their requests: a long system prompt, forty tools, thirty turns."""

from __future__ import annotations

from typing import Any, Iterator

from apis import MODEL
from prompts import Prompt, text

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TURNS, TOOLS = 30, 40
# Texts in which the engines' models answer differ; only their length matters here.
TOKENS = 8


def _schema(number: int) -> dict:
    names = ["file_path", "pattern", "limit", "offset", "command", "description", "timeout"]
    members = {
        name: {"type": "integer" if name in ("limit", "offset", "timeout") else "string", "description": text(number, 9)}
        for name in names[: 2 + number % 6]
    }
    return {"type": "object", "properties": members, "required": names[:1], "additionalProperties": False}


def _tool_input(turn: int) -> dict:
    return {"file_path": f"/src/part_{turn}.rs", "pattern": text(400 + turn, 3)}


def _result(turn: int) -> str:
    """What a tool returns: a few lines, and every fifth time a long file."""
    return text(500 + turn, 250 if turn % 5 == 0 else 30)


def claude_code(answer_of: Any) -> Iterator[Prompt]:
    """Requests as Claude Code sends them to `/v1/messages`. `answer_of(body)` is called by the consumer's `send`."""
    tools = [
        {"name": f"Tool{number}", "description": text(number, 40), "input_schema": _schema(number)} for number in range(TOOLS)
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    messages: list[dict] = []
    for turn in range(TURNS):
        # The first line differs in every request; engines leave it out.
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.0.{turn}; cch={turn:05x};"}
        system = [
            billing,
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
            {"type": "text", "text": text(1, 2500), "cache_control": {"type": "ephemeral"}},
        ]
        if turn == 0:
            reminder = {"type": "text", "text": f"<system-reminder>\n{text(2, 60)}\n</system-reminder>\n"}
            content = [reminder, {"type": "text", "text": "Find the defect in the parser."}]
        else:
            content = [{"type": "tool_result", "tool_use_id": f"toolu_{turn - 1:04}", "content": _result(turn)}]
        # The mark moves to the last block with every request.
        marked = [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}]
        body = {
            "model": MODEL,
            "max_tokens": TOKENS,
            "temperature": 0,
            "system": system,
            "tools": tools,
            "metadata": {"user_id": "user_1_account__session_1"},
            "messages": [*messages, {"role": "user", "content": marked}],
        }
        yield Prompt(f"Claude Code, turn {turn}", MESSAGES, body)
        said = "".join(block.get("text", "") for block in answer_of()["content"])
        call = {"type": "tool_use", "id": f"toolu_{turn:04}", "name": f"Tool{turn % TOOLS}", "input": _tool_input(turn)}
        assistant = [*([{"type": "text", "text": said}] if said else []), call]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": assistant}]


def codex(answer_of: Any) -> Iterator[Prompt]:
    """Requests as Codex sends them to `/v1/responses`."""
    tools = [
        {
            "type": "function",
            "name": f"tool_{number}",
            "description": text(number, 40),
            "strict": False,
            "parameters": _schema(number),
        }
        for number in range(TOOLS)
    ]
    items: list[dict] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text(3, 120)}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Find the defect in the parser."}]},
    ]
    for turn in range(TURNS):
        body = {
            "model": MODEL,
            "max_output_tokens": TOKENS,
            "temperature": 0,
            "instructions": text(4, 2500),
            "input": items,
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "prompt_cache_key": "session-2",
        }
        yield Prompt(f"Codex, turn {turn}", RESPONSES, body)
        said = [item for item in answer_of()["output"] if item["type"] == "message"]
        call = {
            "type": "function_call",
            "name": f"tool_{turn % TOOLS}",
            "arguments": '{"file_path": "/src/part_%d.rs"}' % turn,
            "call_id": f"call_{turn:04}",
        }
        output = {"type": "function_call_output", "call_id": f"call_{turn:04}", "output": _result(turn)}
        words = [part["text"] for item in said for part in item["content"]]
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "".join(words)}]}
        items = [*items, *([message] if said else []), call, output]
