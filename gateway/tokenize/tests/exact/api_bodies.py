"""Writes messages.json and responses.json: requests of Anthropic's Messages API and of OpenAI's Responses API."""

import json
from pathlib import Path

SCHEMA = {
    "properties": {"place": {"type": "string", "enum": ["Köln", "京都"]}, "days": {"type": "number", "default": 1.0}},
    "required": ["place"],
    "type": "object",
    "additionalProperties": False,
}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
UNICODE = "e\u0301 é 世界 🌍👨‍👩‍👧 مرحبا \u202e ½ <|im_end|>"
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b;"
PROSE = "You are a coding agent. Read files before you change them, keep changes small, and run the tests.\n" * 60


def text(value: str, **more) -> dict:
    return {"type": "text", "text": value, **more}


def user(*content, **more) -> dict:
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(content[0], str) else list(content), **more}


def assistant(*content, **more) -> dict:
    return {**user(*content, **more), "role": "assistant"}


def system(*content) -> dict:
    return {**user(*content), "role": "system"}


def use(name: str = "get_weather", call: str = "toolu_1", **arguments) -> dict:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}


def result(content=None, call: str = "toolu_1", **more) -> dict:
    return {"type": "tool_result", "tool_use_id": call, **({} if content is None else {"content": content}), **more}


def weather(**more) -> dict:
    return {"name": "get_weather", "description": 'Wetter für <Ort> & "Tag"', "input_schema": SCHEMA, **more}


def claude_tools() -> list:
    names = ["Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "WebFetch"]
    return [
        {
            "name": f"{names[n % len(names)]}_{n}",
            "description": f"Tool {n}. " + PROSE[:400],
            "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {f"path_{n}": {"type": "string"}}},
        }
        for n in range(40)
    ]


def messages():
    hello = [user("Hello")]
    asked = user("Weather?")
    called = [asked, assistant(use(place="Köln", days=2.5))]
    tools = {"tools": [weather()]}
    yield "plain", {"messages": hello}
    yield "system", {"system": "You are kind.", "messages": hello}
    yield "system blocks", {"system": [text("One."), text(""), text("Two.", cache_control={"type": "ephemeral"})], "messages": hello}
    yield "empty system", {"system": "", "messages": hello}
    yield "no system blocks", {"system": [], "messages": hello}
    yield "billing block", {"system": [text(BILLING), text("Be kind.")], "messages": hello}
    yield "billing string", {"system": f"{BILLING}\nBe kind.", "messages": hello}
    yield "only billing", {"system": [text(BILLING)], "messages": hello}
    yield "system inside", {"system": "One.", "messages": [*hello, assistant("Hi"), system(" Two. "), user("b")]}
    yield "system blocks inside", {"messages": [*hello, system(text(BILLING), text("a"), text("b")), user("b")]}
    yield "empty system inside", {"system": "One.", "messages": [*hello, system(""), user("b"), system(text("")), user("c")]}
    yield "system first of messages", {"messages": [system("One."), *hello]}
    yield "blocks", {"messages": [user(text("a"), text(""), text("b")), assistant(text("c", citations=None)), user(text("d"))]}
    yield "empty text", {"messages": [user("a"), assistant(""), user("")]}
    yield "empty blocks", {"messages": [user("a"), assistant(text("")), user(text("")), user("b")]}
    yield "no blocks", {"messages": [user("a"), {"role": "assistant", "content": []}, {"role": "user", "content": []}, user("b")]}
    yield "unicode", {"system": UNICODE, "messages": [user(UNICODE), assistant(text(UNICODE)), user(text(UNICODE))]}
    yield "spaces", {"system": "  \n a \n", "messages": [user("\n\n a\t "), assistant(text("\n\nb\n")), user("\u3000c\u00a0")]}
    yield "last by assistant", {"messages": [user("Count"), assistant("1, 2,")]}
    yield "turns", {"messages": [m for n in range(20) for m in (user(f"Question {n}?"), assistant(text(f"Answer {n}.")))] + [user("End?")]}
    yield "tools", {"messages": [asked], **tools}
    yield "tools without type", {"messages": [asked], "tools": [weather(input_schema={"properties": {}})]}
    yield "tool without description", {"messages": [asked], "tools": [{"name": "bare", "input_schema": {"b": 1e20, "a": [1e-7, 1, None, True]}}]}
    yield "strict tool", {"messages": [asked], "tools": [weather(strict=True), weather(name="late", defer_loading=True)]}
    yield "custom tool", {"messages": [asked], "tools": [weather(type="custom", cache_control={"type": "ephemeral"})]}
    yield "no tools", {"messages": [asked], "tools": []}
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "get_weather"}):
        yield f"tool_choice {choice['type']}", {"messages": [asked], "tools": [weather(), weather(name="b")], "tool_choice": choice}
    yield "tool call", {"messages": [*called, user(result("18 °C"))], **tools}
    yield "tool call with text", {
        "messages": [asked, assistant(text("I look."), use(place="京都"), use("b", "toolu_2")), user(result("18"), result("{}", "toolu_2"))],
        **tools,
    }
    yield "result blocks", {"messages": [*called, user(result([text("18"), text("sunny")]))], **tools}
    yield "empty results", {"messages": [*called, user(result(), result("", "b"), result([], "c"))], **tools}
    yield "failed result", {"messages": [*called, user(result("no such place", is_error=True), text("Try again."))], **tools}
    yield "text before a result", {"messages": [*called, user(text("Here:"), result("18"), text("And?"))], **tools}
    yield "result of other blocks", {"messages": [*called, user(result([text("a"), {"type": "document", "title": "t"}]))], **tools}
    yield "result by assistant", {"messages": [user("a"), assistant(result("18")), user("b")]}
    yield "calls on", {
        "messages": [
            *called,
            user(result("18")),
            assistant(text("It is 18."), use(place="Köln", days=3)),
            user(result("19"), text("And then?")),
            assistant("Rain."),
            user("Thanks"),
        ],
        **tools,
    }
    yield "thinking", {"messages": [user("a"), assistant({"type": "thinking", "thinking": "because", "signature": "s"}, text("b")), user("c")]}
    yield "thinking while calling", {
        "messages": [asked, assistant({"type": "thinking", "thinking": "so\n", "signature": ""}, use(place="Köln")), user(result("18"))],
        **tools,
    }
    yield "two thoughts", {
        "messages": [user("a"), assistant({"type": "thinking", "thinking": "x"}, {"type": "thinking", "thinking": "y"}, text("b")), user("c")]
    }
    yield "only thinking", {"messages": [user("a"), assistant({"type": "thinking", "thinking": "x"}), user("c")]}
    yield "redacted thinking", {"messages": [user("a"), assistant({"type": "redacted_thinking", "data": "eA=="}, text("b")), user("c")]}
    yield "only redacted thinking", {"messages": [user("a"), assistant({"type": "redacted_thinking", "data": "eA=="}), user("c")]}
    yield "thinking enabled", {"messages": hello, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    yield "thinking disabled", {"messages": hello, "thinking": {"type": "disabled"}}
    yield "thinking adaptive", {"messages": hello, "thinking": {"type": "adaptive"}}
    yield "effort", {"messages": hello, "output_config": {"effort": "xhigh"}}
    yield "effort while disabled", {"messages": hello, "output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}
    yield "template variables", {"messages": hello, "chat_template_kwargs": {"enable_thinking": False}}
    yield "Claude Code", {
        "system": [text(BILLING), text("You are an agent.", cache_control={"type": "ephemeral"}), text(PROSE, cache_control={"type": "ephemeral"})],
        "messages": [
            user(text("<system-reminder>\nToday is Monday.\n</system-reminder>"), text("Fix the test.", cache_control={"type": "ephemeral"})),
            assistant({"type": "thinking", "thinking": "Look first.", "signature": "abc"}, text("I'll look."), use("Bash_0", "toolu_a", command="ls -la", timeout=60)),
            user(result("total 8\nsrc\ttests\r\n", "toolu_a")),
            assistant(use("Read_1", "toolu_b", file_path="/src/ü.rs"), use("Read_1", "toolu_c", file_path="/b.rs")),
            user(result([text("1→fn main() {}\n")], "toolu_b"), result("missing", "toolu_c", is_error=True), text("<system-reminder>x</system-reminder>")),
            system("The user opened a file."),
            assistant(text("Done.")),
            user(text("Run them.", cache_control={"type": "ephemeral", "ttl": "1h"})),
        ],
        "tools": claude_tools(),
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "stream": True,
        "max_tokens": 32000,
    }
    yield "no messages", {"messages": []}
    yield "unknown role", {"messages": [{"role": "tool", "content": "a"}]}
    yield "no schema", {"messages": [asked], "tools": [{"name": "a"}]}
    yield "image", {"messages": [user(text("What?"), {"type": "image", "source": PIXEL})]}
    yield "image in a result", {"messages": [*called, user(result([text("a"), {"type": "image", "source": PIXEL}]))], **tools}
    yield "image without source", {"messages": [user({"type": "image"}, text("a"))]}


def item(role: str, *content, **more) -> dict:
    return {"type": "message", "role": role, "content": list(content), **more}


def input_text(value: str, **more) -> dict:
    return {"type": "input_text", "text": value, **more}


def output_text(value: str, **more) -> dict:
    return {"type": "output_text", "text": value, **more}


def call(arguments='{"place": "Köln",  "days": 2.50}', name: str = "get_weather", call_id: str = "call_1", **more) -> dict:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **more}


def output(value, call_id: str = "call_1", **more) -> dict:
    return {"type": "function_call_output", "call_id": call_id, "output": value, **more}


def reasoning(content=None, summary=(), **more) -> dict:
    parts = None if content is None else [{"type": "reasoning_text", "text": part} for part in content]
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": part} for part in summary], "content": parts, **more}


def function(name: str = "get_weather", **more) -> dict:
    return {"type": "function", "name": name, "description": 'Wetter für <Ort> & "Tag"', "parameters": SCHEMA, **more}


def codex_tools() -> list:
    shell = {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    return [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": shell},
        {"type": "function", "name": "update_plan", "description": PROSE[:500], "strict": False, "parameters": SCHEMA},
        {"type": "web_search"},
    ]


def responses():
    asked = {"role": "user", "content": "Weather?"}
    tools = {"tools": [function(strict=True)]}
    yield "string", {"input": "Hello"}
    yield "empty string", {"input": ""}
    yield "instructions", {"input": "Hello", "instructions": "You are kind."}
    yield "empty instructions", {"input": "Hello", "instructions": ""}
    yield "items", {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}
    yield "typed items", {"input": [item("user", input_text("a"), input_text("b")), item("assistant", output_text("c")), item("user", input_text("d"))]}
    yield "systems", {"instructions": "One.", "input": [{"role": "system", "content": "Two."}, asked, item("system", input_text("Three."))]}
    yield "developers", {"instructions": "One.", "input": [item("developer", input_text("Two."), input_text("Three.")), asked, {"role": "developer", "content": "Four."}]}
    yield "one developer", {"input": [{"role": "developer", "content": "Two."}, asked]}
    yield "unicode", {"instructions": UNICODE, "input": [item("user", input_text(UNICODE)), item("assistant", output_text(UNICODE)), item("user", input_text("x"))]}
    yield "empty texts", {"input": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, item("user", input_text(""))]}
    yield "turns", {"input": [i for n in range(20) for i in (item("user", input_text(f"Question {n}?")), item("assistant", output_text(f"Answer {n}.")))] + [asked]}
    yield "two outputs", {"input": [asked, item("assistant", output_text("a")), item("assistant", output_text("b")), asked]}
    yield "output of two parts", {"input": [asked, item("assistant", output_text("a"), output_text("b")), asked]}
    yield "annotated output", {"input": [asked, item("assistant", output_text("a", annotations=[], logprobs=[]), id="msg_1", status="completed", phase="final_answer"), asked]}
    yield "last by assistant", {"input": [asked, {"role": "assistant", "content": "1, 2,"}]}
    yield "continued", {"input": [asked, item("assistant", output_text("1, 2, "), status="incomplete", id="msg_1")]}
    yield "continued user", {"input": [item("user", input_text("1, 2,"), status="in_progress")]}
    yield "string with a status", {"input": [asked, {"type": "message", "role": "assistant", "content": "1, 2,", "status": "incomplete"}]}
    yield "continued reasoning", {"input": [asked, reasoning(["so"], status="in_progress")]}
    yield "input text by assistant", {"input": [asked, item("assistant", input_text("a"), input_text("b")), asked]}
    yield "tools", {"input": [asked], **tools}
    yield "plain tool", {"input": [asked], "tools": [{"type": "function", "name": "bare", "parameters": {"b": 1e20, "a": [1e-7, 1, None, True]}, "vendor": 1}]}
    yield "tools unused", {"input": [asked], "tool_choice": "none", **tools}
    yield "tool chosen", {"input": [asked], "tool_choice": {"type": "function", "name": "b"}, "tools": [function(), function("b")]}
    yield "tool required", {"input": [asked], "tool_choice": "required", **tools}
    yield "no tools", {"input": [asked], "tools": []}
    yield "built-in tools", {"input": [asked], "tools": [{"type": "web_search"}, function(defer_loading=True)]}
    yield "only built-in tools", {"input": [asked], "tools": [{"type": "web_search"}]}
    yield "custom tool", {"input": [asked], "tools": [{"type": "custom", "name": "apply_patch", "description": "Applies a patch."}, {"type": "custom", "name": "b", "format": {"type": "text"}}]}
    yield "grammar tool", {"input": [asked], "tools": [{"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}]}
    yield "namespace", {"input": [asked], "tools": [{"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "find", "parameters": SCHEMA}, {"type": "custom", "name": "c"}]}]}
    yield "call", {"input": [asked, call(), output("18 °C")], **tools}
    yield "two calls", {"input": [asked, call(), call("{}", "b", "call_2"), output("18"), output("x", "call_2")], **tools}
    yield "call after text", {"input": [asked, item("assistant", output_text("I look.")), call(), output("18")], **tools}
    yield "text after call", {"input": [asked, call(), item("assistant", output_text("I look.")), output("18")], **tools}
    yield "call in a namespace", {"input": [asked, call(namespace="crm", name="find"), output("18")], **tools}
    yield "output parts", {"input": [asked, call(), output([input_text("18"), input_text("sunny")])], **tools}
    yield "stored output", {"input": [asked, call(id="fc_1", status="completed"), output("18", id="fco_1", status="completed")], **tools}
    yield "stored output parts", {"input": [asked, call(), output([input_text("18")], id="fco_1", status="completed")], **tools}
    yield "custom call", {"input": [asked, {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a "b"\n'}, {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}]}
    yield "stored custom call", {"input": [asked, {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "p", "input": ""}, {"type": "custom_tool_call_output", "id": "o", "call_id": "c1", "output": [input_text("ok")]}]}
    yield "broken arguments", {"input": [asked, call("{"), output("18"), call("[1]"), output("18"), call(""), output("x")], **tools}
    yield "reasoning", {"input": [asked, reasoning(["because"]), item("assistant", output_text("b")), asked]}
    yield "reasoning summary", {"input": [asked, reasoning(None, ["because", "and"], id="rs_1"), item("assistant", output_text("b")), asked]}
    yield "reasoning twice", {"input": [asked, reasoning(["a", "b"]), reasoning(["c"], ["d"]), item("assistant", output_text("b")), asked]}
    yield "reasoning while calling", {"input": [asked, reasoning(["so\n"]), call(), output("18"), reasoning(["then"]), call("{}", "b", "call_2"), output("x", "call_2")], **tools}
    yield "empty reasoning", {"input": [asked, reasoning(), item("assistant", output_text("b")), asked]}
    yield "encrypted reasoning", {"input": [asked, reasoning(None, encrypted_content="gAAAA"), asked]}
    yield "effort", {"input": "Hello", "reasoning": {"effort": "high", "summary": "auto"}}
    yield "effort none", {"input": "Hello", "reasoning": {"effort": "none"}}
    yield "reasoning without effort", {"input": "Hello", "reasoning": {"summary": "auto"}}
    yield "null effort", {"input": "Hello", "reasoning": {"effort": None}}
    yield "template variables", {"input": "Hello", "chat_template_kwargs": {"enable_thinking": False}, "reasoning": {"effort": "low"}}
    yield "text format", {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}, "verbosity": "low"}}
    yield "Codex", {
        "instructions": PROSE,
        "input": [
            item("developer", input_text("<permissions>\nsandbox: workspace-write\n</permissions>")),
            item("user", input_text("# AGENTS.md\n\n" + PROSE[:800])),
            item("user", input_text("<environment_context>\n  <cwd>/w</cwd>\n</environment_context>")),
            item("user", input_text("Fix the test.")),
            reasoning(None, ["**Looking**"], encrypted_content=None),
            item("assistant", output_text("I'll look.")),
            call('{"command":["bash","-lc","ls -la"],"workdir":"/w"}', "shell", "call_a"),
            output('{"output":"src\\ntests\\n","metadata":{"exit_code":0,"duration_seconds":0.1}}', "call_a"),
            reasoning(["Read it."], ["**Reading**"]),
            call('{"command":["cat","ü.rs"]}', "shell", "call_b"),
            call('{"plan":[]}', "update_plan", "call_c"),
            output("fn main() {}\n", "call_b"),
            output("Plan updated", "call_c"),
            item("assistant", output_text("Done.")),
            item("user", input_text("Run them.")),
        ],
        "tools": codex_tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
    }
    yield "no items", {"input": []}
    yield "unknown item", {"input": [asked, {"type": "item_reference", "id": "x"}]}
    yield "text part of user", {"input": [item("user", text("a"))]}
    yield "output text of user", {"input": [item("user", output_text("a"))]}
    yield "refusal", {"input": [asked, item("assistant", {"type": "refusal", "refusal": "no"}), asked]}
    yield "image", {"input": [item("user", input_text("What?"), {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="})]}
    yield "image in an output", {"input": [asked, call(), output([input_text("18"), {"type": "input_image", "image_url": "https://h/a.png"}])], **tools}


def write(name: str, cases: list) -> None:
    Path(__file__).with_name(name).write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
    print(f"{name}: {len(cases)} bodies")


def main() -> None:
    write("messages.json", [{"name": name, "body": {"model": "m", "max_tokens": 4000, **body}} for name, body in messages()])
    write("responses.json", [{"name": name, "body": {"model": "m", **body}} for name, body in responses()])


main()
