"""Writes bodies.json: the chat requests of the exactness tests."""

import json
from pathlib import Path

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & \"Tag\"",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Köln", "京都"]}, "days": {"type": "number", "default": 1.0}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
BARE = {"function": {"parameters": {"b": 1e20, "a": [1e-7, 1, None, True]}, "name": "bare", "vendor": 1}, "type": "function"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Köln",  "days": 2.50}'}}
SECOND = {"id": "call_2", "type": "function", "function": {"name": "bare", "arguments": "{}"}}
CODE = "```rust\nfn main() {\n\tprintln!(\"{}\", 0x1F);\r\n}\n```\n"


def user(content) -> dict:
    return {"role": "user", "content": content}


def assistant(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def system(content) -> dict:
    return {"role": "system", "content": content}


def tool(content, call="call_1") -> dict:
    return {"role": "tool", "tool_call_id": call, "content": content}


def parts(*texts) -> list:
    return [{"type": "text", "text": text} for text in texts]


def bodies():
    hello = [user("Hello")]
    asked = [system("Be brief."), user("Weather?")]
    called = [*asked, assistant(None, tool_calls=[CALL])]
    yield "plain", {"messages": hello}
    yield "system", {"messages": [system("You are kind."), *hello]}
    yield "two systems", {"messages": [system("One."), user("a"), system("Two."), user("b")]}
    yield "empty", {"messages": [system(""), user(""), assistant(""), user(" ")]}
    yield "spaces", {"messages": [user("  \n\n a\t\n "), assistant("\n\nb\n\n"), user("\u3000c\u00a0")]}
    yield "unicode", {"messages": [user("e\u0301 é 世界 🌍👨‍👩‍👧 Ελλάδα مرحبا \u202e \ufeff ½ ①")]}
    yield "specials in content", {"messages": [user("<|im_end|> <think>x</think> <｜User｜> <|im_start|>system\n"), assistant("ok"), user("a")]}
    yield "code", {"messages": [user(CODE * 3), assistant("It's done; they're 12345 lines, I'll say."), user("Thanks!!!???")]}
    yield "parts", {"messages": [user(parts("a", "", "b")), assistant(parts("c")), user(parts("d"))]}
    yield "no parts", {"messages": [user([]), assistant("x"), user("y")]}
    yield "turns", {"messages": [m for n in range(40) for m in (user(f"Question {n}?"), assistant(f"Answer {n}."))] + [user("End?")]}
    yield "last by assistant", {"messages": [user("Hi"), assistant("Hi there")]}
    yield "continue", {"messages": [user("Count"), assistant("1, 2, ")], "continue_final_message": True, "add_generation_prompt": False}
    yield "continue, trimmed", {"messages": [user("Count"), assistant("\n1, 2,")], "continue_final_message": True, "add_generation_prompt": False}
    yield "no generation prompt", {"messages": hello, "add_generation_prompt": False}
    yield "thinking on", {"messages": hello, "chat_template_kwargs": {"enable_thinking": True}}
    yield "thinking off", {"messages": hello, "chat_template_kwargs": {"enable_thinking": False}}
    yield "effort none", {"messages": hello, "reasoning_effort": "none"}
    yield "effort high", {"messages": hello, "reasoning_effort": "high"}
    yield "documents", {"messages": hello, "documents": [{"title": "T", "text": "x"}]}
    yield "tools", {"messages": asked, "tools": [WEATHER, BARE]}
    yield "tools unused", {"messages": asked, "tools": [WEATHER], "tool_choice": "none"}
    yield "tool chosen", {"messages": asked, "tools": [WEATHER, BARE], "tool_choice": {"type": "function", "function": {"name": "bare"}}}
    yield "tool call", {"messages": [*called, tool("18 °C")], "tools": [WEATHER]}
    yield "tool call with text", {"messages": [*asked, assistant("I look.", tool_calls=[CALL, SECOND]), tool("18"), tool("{}", "call_2")], "tools": [WEATHER, BARE]}
    yield "tool parts", {"messages": [*called, tool(parts("18", "sunny"))], "tools": [WEATHER]}
    yield "tool call and on", {"messages": [*called, tool("18"), assistant("It is 18."), user("And then?")], "tools": [WEATHER]}
    yield "no calls", {"messages": [user("a"), assistant("b", tool_calls=[]), user("c")]}
    yield "reasoning", {"messages": [user("a"), assistant("b", reasoning_content="because"), user("c")]}
    yield "reasoning while calling", {"messages": [*asked, assistant("", reasoning_content="so\n", tool_calls=[CALL]), tool("18")], "tools": [WEATHER]}
    yield "reasoning inside", {"messages": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")]}
    yield "names", {"messages": [{"role": "user", "name": "Ann", "content": "a"}, {"role": "assistant", "name": "Bob", "content": "b"}, user("c")]}
    yield "billing", {"messages": [system("x-anthropic-billing-header: 1\nBe kind."), user("a")]}


def main() -> None:
    cases = [{"name": name, "body": {"model": "m", **body}} for name, body in bodies()]
    Path(__file__).with_name("bodies.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(cases)} bodies")


main()
