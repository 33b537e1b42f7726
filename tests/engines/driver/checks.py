"""What is expected of a pair behind the gateway."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from addresses import DECODE, GATEWAY, GATEWAY_ADMIN, PREFILL
import handover
from apis import APIS, MODEL
from pairs import CONTEXT, Pair
from talk import Answer, Metrics, Stream, connect, post

DATA = Path(__file__).resolve().parent.parent / "data"


@dataclass
class Context:
    pair: Pair
    # False: the driver's own stand-in for the gateway is under test.
    gateway: bool
    golden: list[dict] = field(default_factory=lambda: json.loads((DATA / "golden-tokens.json").read_text()))
    chats: list[dict] = field(default_factory=lambda: json.loads((DATA / "golden-chat.json").read_text()))
    moved: float = 0
    computed: float = 0

    @property
    def api(self):
        return APIS[self.pair.engine]


Check = Callable[[Context], "str | None"]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def eventually(what: str, condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until the condition held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - start


def warm_up(context: Context) -> str:
    """The first request initialises much, and on a busy machine the engines' handshake may take longer than they wait."""
    last: BaseException | None = None
    for attempt in range(1, 6):
        try:
            context.api.ask(GATEWAY, list(range(2000 * attempt, 2000 * attempt + 40)), 2)
            return f"{attempt} attempt(s)"
        except (AssertionError, OSError) as error:
            last = error
            time.sleep(2)
    raise AssertionError(f"no answer in 5 attempts; the last one: {last}")


@check
def golden_tokens(context: Context) -> str:
    """Each prompt's tokens are those of a single engine."""
    moved, computed = handover.moved_tokens(context.pair), handover.computed_tokens(context.pair)
    wrong = []
    for case in context.golden:
        got = context.api.ask(GATEWAY, case["prompt"], len(case["out"]))
        if got != case["out"]:
            wrong.append(f"{len(case['prompt'])} tokens: {got} instead of {case['out']}")
    context.moved, context.computed = moved, computed
    assert not wrong, "; ".join(wrong)
    return f"{len(context.golden)} prompts of {len(context.golden[0]['prompt'])} to {len(context.golden[-1]['prompt'])} tokens"


@check
def kv_moved(context: Context) -> str:
    """Decode had the prompts' KV from prefill."""
    pair = context.pair
    wanted = handover.expected(pair, [case["prompt"] for case in context.golden])

    def moved() -> float:
        return handover.moved_tokens(pair) - context.moved

    # The store is written behind the answer's back: decode may come too early for some prompts.
    enough = wanted / 4 if pair.connector == "store" else wanted
    eventually(f"{enough:g} tokens moved, seen {moved():g}", lambda: moved() >= enough, 10)
    seen, computed = moved(), handover.computed_tokens(pair) - context.computed
    assert seen <= wanted, f"{seen:g} tokens moved, more than the {wanted} there are"
    if pair.connector != "store":
        assert computed == 0, f"decode computed {computed:g} prompt tokens itself"
    return f"{seen:g} of {wanted} tokens; decode computed {computed:g}"


@check
def golden_tokens_streamed(context: Context) -> None:
    """The same as a stream."""
    for case in context.golden:
        got = context.api.ask_stream(GATEWAY, case["prompt"], len(case["out"]))
        assert got == case["out"], f"{len(case['prompt'])} tokens: {got} instead of {case['out']}"


@check
def chat(context: Context) -> str:
    """/v1/chat/completions, whole and streamed, gives the reference's text."""
    for case in context.chats:
        body = {"model": MODEL, "messages": case["messages"], "max_tokens": case["max_tokens"], "temperature": 0}
        whole = post(GATEWAY, "/v1/chat/completions", body).ok()
        got = whole["choices"][0]["message"]["content"]
        assert got == case["content"], f"{got!r} instead of {case['content']!r}"
        assert whole["choices"][0]["finish_reason"] == "length", whole["choices"][0]
        _check_usage(whole["usage"], case)

        text, usage, reasons = "", None, []
        with Stream(GATEWAY, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}) as stream:
            for event in stream.events():
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reasons.append(choice["finish_reason"])
        assert text == case["content"], f"streamed {text!r} instead of {case['content']!r}"
        assert [reason for reason in reasons if reason] == ["length"], reasons
        assert usage, "no usage in the stream"
        _check_usage(usage, case)
    return f"{len(context.chats)} conversations"


@check
def agents_apis(context: Context) -> str | None:
    """/v1/responses and /v1/messages, whole and streamed, give the text of a chat, and the prompt is computed by the prefill."""
    if not context.gateway:
        return "not with the stand-in"
    computed = handover.computed_tokens(context.pair)
    for case in context.chats:
        system = [message["content"] for message in case["messages"] if message["role"] == "system"]
        turns = [message for message in case["messages"] if message["role"] != "system"]
        limit, common = case["max_tokens"], {"model": MODEL, "temperature": 0}
        # SGLang keeps two tokens of the limit for itself.
        output = limit + 2 if context.pair.engine == "sglang" else limit
        response = {**common, "input": turns, "max_output_tokens": output, **({"instructions": system[0]} if system else {})}
        message = {**common, "messages": turns, "max_tokens": limit, **({"system": system[0]} if system else {})}
        whole = post(GATEWAY, "/v1/responses", response).ok()
        texts = {"response": "".join(part["text"] for item in whole["output"] for part in item.get("content") or [])}
        whole = post(GATEWAY, "/v1/messages", message).ok()
        texts["message"] = "".join(block.get("text", "") for block in whole["content"])
        texts["streamed response"] = "".join(
            event["delta"] for event in _typed_events("/v1/responses", response, "response.completed", "response.incomplete")
            if event["type"] == "response.output_text.delta"
        )
        texts["streamed message"] = "".join(
            event["delta"].get("text", "") for event in _typed_events("/v1/messages", message, "message_stop")
            if event["type"] == "content_block_delta"
        )
        for name, text in texts.items():
            assert text == case["content"], f"{name} {text!r} instead of {case['content']!r}"
    seen = handover.computed_tokens(context.pair) - computed
    assert context.pair.connector in (None, "store") or seen == 0, f"decode computed {seen:g} prompt tokens itself"
    return f"{len(context.chats)} conversations in each of 4 forms; decode computed {seen:g}"


def _typed_events(path: str, body: dict, *last: str) -> list[dict]:
    """The events of a stream whose events have types; it must end with one of `last`."""
    with Stream(GATEWAY, path, body) as stream:
        lines = [line[5:] for line in stream.answer if line.startswith(b"data:")]
    events = [json.loads(line) for line in lines]
    assert events and events[-1]["type"] in last, f"{path} ended with {events[-1:]}"
    return events


def _check_usage(usage: dict, case: dict) -> None:
    got = usage["prompt_tokens"], usage["completion_tokens"]
    assert got == (case["prompt_tokens"], case["max_tokens"]), usage


@check
def several_prompts_in_one_request(context: Context) -> None:
    """A batch's answers come complete and in order."""
    cases = context.golden[:3]
    got = context.api.ask_many(GATEWAY, [case["prompt"] for case in cases], 24)
    assert got == [case["out"] for case in cases], got


@check
def several_samples(context: Context) -> str:
    """`n` answers to one conversation, each complete. Sampling is among one token, so all are the reference's."""
    if not context.gateway and context.pair.engine == "sglang":
        return "left out: an SGLang pair cannot, and the stand-in does not help it"
    case = context.chats[0]
    body = {"model": MODEL, "messages": case["messages"], "max_tokens": case["max_tokens"], "n": 2, "top_k": 1}
    choices = post(GATEWAY, "/v1/chat/completions", body).ok()["choices"]
    got = [choice["message"]["content"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    assert got == [case["content"]] * 2, got
    return "n = 2"


@check
def requests_at_once(context: Context) -> str:
    """Streams and whole answers beside each other do not mix."""
    wrong: list[str] = []

    def client(number: int) -> None:
        for turn in range(4):
            case = context.golden[(number + turn) % len(context.golden)]
            ask = context.api.ask if (number + turn) % 2 else context.api.ask_stream
            try:
                if ask(GATEWAY, case["prompt"], len(case["out"])) != case["out"]:
                    wrong.append(f"client {number}: wrong tokens for {len(case['prompt'])}")
            except (AssertionError, OSError, ValueError) as error:
                wrong.append(f"client {number}: {error}")

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert not wrong, "; ".join(wrong)
    return f"{len(clients)} clients, {4 * len(clients)} requests"


@check
def a_client_that_leaves(context: Context) -> str:
    """Closing a stream in its middle frees both engines."""
    api, tokens = context.api, 6000
    _await_idle(api, 30)
    before = api.generated(DECODE)
    with Stream(GATEWAY, api.path, api.body(context.golden[0]["prompt"], tokens)) as stream:
        events = stream.events()
        for _ in range(3):
            next(events)
        eventually("the request is seen on decode", lambda: api.busy(DECODE) == 1, 10)
    seconds = _await_idle(api, 10)
    generated = api.generated(DECODE) - before
    assert generated < tokens, f"decode went on to the end: {generated:g} tokens"
    return f"both idle {seconds:.1f} s later, after {generated:g} of {tokens} tokens"


def _await_idle(api, seconds: float) -> float:
    """Seconds until both engines were idle, for a second at least: a request may be between them."""
    start = time.monotonic()
    idle_since: float | None = None
    while True:
        busy = api.busy(PREFILL), api.busy(DECODE)
        now = time.monotonic()
        if any(busy):
            idle_since = None
            text = f"prefill has {busy[0]:g} requests and decode {busy[1]:g} after {seconds:g} s"
            assert now - start < seconds, text
        elif idle_since is None:
            idle_since = now
        elif now - idle_since >= 1:
            return idle_since - start
        time.sleep(0.1)


@check
def clients_that_leave_before_an_answer(context: Context) -> str:
    """Giving up on a whole answer frees both engines, and the pair goes on working."""
    api = context.api
    for turn in range(4):
        # Nothing of it is cached, so that its prefill takes a while.
        prompt = random.Random(turn).choices(range(1000, 100_000), k=3000)
        connection = connect(GATEWAY)
        connection.request("POST", api.path, json.dumps(api.body(prompt, 5000)), {"Content-Type": "application/json"})
        eventually("the request is on an engine", lambda: api.busy(PREFILL) + api.busy(DECODE) > 0, 30)
        if turn % 2:
            eventually("the request is on decode", lambda: api.busy(DECODE) > 0, 30)
        connection.close()
    seconds = _await_idle(api, 30)
    golden = context.golden[2]
    assert api.ask(GATEWAY, golden["prompt"], 24) == golden["out"], "wrong tokens afterwards"
    return f"both idle {seconds:.1f} s later"


@check
def wrong_requests(context: Context) -> str:
    """Each gives a 4xx that says what is wrong, and harms nobody else."""
    api = context.api
    message = [{"role": "user", "content": "x"}]
    chat_body = {"model": MODEL, "messages": message, "max_tokens": 4}
    completion = api.body(context.golden[0]["prompt"], 4)
    without_prompt = {key: value for key, value in completion.items() if key not in ("prompt", "input_ids")}
    requests: list[tuple[str, str, Any]] = [
        ("not JSON", "/v1/chat/completions", b'{"model":'),
        ("no messages", "/v1/chat/completions", {"model": MODEL}),
        ("no prompt", api.path, without_prompt),
        # Only the engines can find these.
        ("a wrong type", "/v1/chat/completions", {**chat_body, "temperature": "hot"}),
        ("a value out of range", "/v1/chat/completions", {**chat_body, "top_p": 7}),
        ("too long", api.path, api.body([5] * (CONTEXT + 100), 4)),
    ]
    if context.gateway:
        requests.append(("an unknown model", "/v1/chat/completions", {**chat_body, "model": "other"}))
        requests.append(("an unknown path", "/nothing", {}))
    for what, path, body in requests:
        answer = post(GATEWAY, path, body, 60)
        assert 400 <= answer.status < 500, f"{what}: HTTP {answer.status}: {answer.body[:300]!r}"
        _check_error(what, answer, context.gateway)
    _await_idle(api, 20)
    case = context.golden[0]
    assert api.ask(GATEWAY, case["prompt"], 24) == case["out"], "wrong tokens after the wrong requests"
    return f"{len(requests)} kinds"


def _check_error(what: str, answer: Answer, gateway: bool) -> None:
    text = answer.body[:300].decode(errors="replace")
    body = answer.json()
    if not gateway:
        # SGLang's own errors lack the outer object; its own interface's errors have nothing but a message.
        assert body.get("error", body).get("message"), f"{what}: no message in {text}"
        return
    error = body["error"]
    for member in ("message", "type", "code"):
        assert isinstance(error[member], (str, int)), f"{what}: no {member} in {text}"
    for inside in ("bootstrap_", "kv_transfer_params", "site-packages"):
        assert inside not in error["message"], f"{what}: shows the client what is inside: {text}"


@check
def the_proof_can_fail(context: Context) -> str:
    """Control, past the gateway: without a hand-over none is counted, or the tokens differ."""
    case = context.golden[4]
    return handover.control(context.pair, case["prompt"], case["out"])


@check
def nothing_is_left(context: Context) -> str:
    """At the end neither the engines nor the gateway hold a request."""
    seconds = _await_idle(context.api, 20)
    if context.gateway:
        metrics = Metrics(GATEWAY_ADMIN)
        assert metrics.has("moongate_requests_in_flight"), "the gateway does not count its requests"
        open_requests = metrics.sum("moongate_requests_in_flight")
        assert open_requests == 0, f"the gateway counts {open_requests:g} open requests"
    return f"idle after {seconds:.1f} s"
