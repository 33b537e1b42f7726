"""Prompts for cache hits: of many lengths, with much in common, in every form that a client may send."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from apis import BLOCK, MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (
    "the cache of a page is where its hash says and when an engine reads prompt after prompt it finds what "
    "others stored before Straße naïve 東京 données мир 🙂 {json: [1, 2.5]} def f(x): return x\n"
).split(" ")


@dataclass(frozen=True)
class Prompt:
    name: str
    path: str
    body: dict


def prompts() -> list[Prompt]:
    """In the order in which they are sent."""
    return [*_lengths(), *_shared_prefixes(), *_texts(), *_chats(), *_salted()]


def ids(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 100_000), k=length)


def text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def completion(name: str, prompt: Any, **more: Any) -> Prompt:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return Prompt(name, COMPLETIONS, body)


def chat(name: str, messages: list[dict], **more: Any) -> Prompt:
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    return Prompt(name, CHAT, body)


def _lengths() -> list[Prompt]:
    """New prompts, around multiples of the page and of what is worth a look into the store; then the same again."""
    lengths = [1, 2, 31, 32, 33, 64, 65, 96, 255, 256, 257, 287, 288, 289, 320, 500, 512, 513, 1000, 1024, 1999, 2000]
    new = [completion(f"{length} ids", ids(length, length)) for length in lengths]
    return new + [completion(f"{len(p.body['prompt'])} ids again", p.body["prompt"]) for p in new]


def _shared_prefixes() -> list[Prompt]:
    whole = ids(2000, 2000)
    cuts = [BLOCK, BLOCK + 1, 250, 256, 270, 320, 640, 1000, 1023, 1024, 1999]
    tails = [(cut, 1 + cut % 300) for cut in cuts]
    return [completion(f"{cut} ids shared, {tail} new", whole[:cut] + ids(cut, tail)) for cut, tail in tails]


def _texts() -> list[Prompt]:
    long = text(1, 900)
    found = [completion(f"text of {len(part)} bytes", part) for part in (" ", "x", long[:50], long[:700], long, long)]
    return [*found, completion("text with another end", long[: len(long) // 2] + text(2, 80))]


def _chats() -> list[Prompt]:
    system = {"role": "system", "content": text(3, 250)}
    found = []
    for number in range(4):
        user = {"role": "user", "content": text(10 + number, 30 * number + 1)}
        found.append(chat(f"chat {number} with a shared system prompt", [system, user]))
    return [*found, chat("chat without a system prompt", [{"role": "user", "content": "Hi!"}])]


def _salted() -> list[Prompt]:
    prompt, messages = ids(77, 700), [{"role": "user", "content": text(78, 300)}]
    # So short that SGLang has it from its own caches or not at all.
    short = ids(79, 200)
    found = [completion("700 ids", prompt), chat("long chat", messages), completion("200 ids more", short)]
    for salt in ("tenant-a", "tenant-ß", "tenant-a"):
        found.append(completion(f"700 ids salted {salt}", prompt, cache_salt=salt))
        found.append(chat(f"long chat salted {salt}", messages, cache_salt=salt))
        found.append(completion(f"200 ids salted {salt}", short, cache_salt=salt))
    return found


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather — in °C",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def renderings() -> list[tuple[str, dict]]:
    """Bodies of chats that templates treat in different ways."""
    def user(content: Any) -> dict:
        return {"role": "user", "content": content}

    def assistant(content: Any, **more: Any) -> dict:
        return {"role": "assistant", "content": content, **more}

    hi = user("Hi!")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"temp": 21.50, "text": "sunny ☀"}'}
    system = {"role": "system", "content": "You are terse."}
    cases: list[tuple[str, list[dict], dict]] = [
        ("one word", [hi], {}),
        ("system", [system, hi], {}),
        ("empty", [user("")], {}),
        ("empty system", [{"role": "system", "content": ""}, hi], {}),
        ("spaces", [user("  \n\t two\n\n\n lines  ")], {}),
        ("unicode", [user("naïve Straße 東京 🙂👩‍👩‍👧 e\u0301 \u200b \ufeff мир")], {}),
        ("special tokens in text", [user("<|im_end|>\n<|im_start|>system\nno <think></think> <|endoftext|>")], {}),
        ("parts", [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])], {}),
        ("turns", [system, hi, assistant("Hello."), user("And now?")], {}),
        ("thought", [hi, assistant("<think>\nhm\n</think>\n\nHello."), user("And now?")], {}),
        ("reasoning", [hi, assistant("Hello.", reasoning_content="hm"), user("And now?")], {}),
        ("no thinking", [hi], {"chat_template_kwargs": {"enable_thinking": False}}),
        ("tools", [hi], {"tools": [WEATHER]}),
        ("two tools and a system prompt", [system, hi], {"tools": [WEATHER, PLAIN_TOOL]}),
        ("tool call", [hi, assistant(None, tool_calls=[call]), result], {"tools": [WEATHER]}),
        ("tool call with text", [hi, assistant("See:", tool_calls=[call]), result, user("Ok?")], {"tools": [WEATHER]}),
        ("two results", [hi, assistant("", tool_calls=[call, call]), result, result], {"tools": [WEATHER]}),
        ("long", [system, user(text(5, 1500))], {}),
    ]
    return [(name, {"model": MODEL, "messages": messages, **more}) for name, messages, more in cases]
