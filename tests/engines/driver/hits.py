"""Does the gateway know what is cached? Its predictions against what the engines then find."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable

from addresses import GATEWAY_ADMIN, GATEWAY_PORT, HOST, MASTER_HTTP, PREFILL
from apis import APIS
from pairs import Pair
from processes import Processes, Server
from prompts import CHAT, COMPLETIONS, Prompt, chat, completion, ids, prompts, renderings, text
from talk import Metrics, get, post

# Share of tokens that must be predicted as they are found.
RIGHT = 0.99
# The store is written behind an answer's back.
QUIET_SECONDS, QUIET_STEP = 0.4, 0.1


@dataclass
class Seen:
    """One request: its prompt's tokens, and how many of them were expected and found in a cache."""

    name: str
    tokens: int
    l1: int
    l2: int
    l3: int
    found: int = 0

    @property
    def predicted(self) -> int:
        return self.l1 + self.l2 + self.l3


@dataclass
class Tally:
    seen: list[Seen] = field(default_factory=list)

    @property
    def false(self) -> int:
        return sum(max(0, one.predicted - one.found) for one in self.seen)

    @property
    def missed(self) -> int:
        return sum(max(0, one.found - one.predicted) for one in self.seen)

    def text(self) -> str:
        tokens, missed, false = sum(one.tokens for one in self.seen), self.missed, self.false
        by_tier = ", ".join(f"{tier} {sum(getattr(one, tier) for one in self.seen)}" for tier in ("l1", "l2", "l3"))
        same = sum(one.predicted == one.found for one in self.seen)
        note = f"{same} of {len(self.seen)} prompts exact; {tokens} tokens, predicted {by_tier}, "
        note += f"found {sum(one.found for one in self.seen)}, missed {missed}, false {false}"
        wrong = [f"\n    {one}" for one in self.seen if one.predicted != one.found]
        assert missed + false <= (1 - RIGHT) * tokens, note + "".join(wrong)
        return note + "".join(wrong[:10])


class Hits:
    """The engines under one gateway that predicts."""

    def __init__(self, pair: Pair, processes: Processes, gateway_at: Callable[..., Server]):
        self.pair, self.processes, self.gateway_at = pair, processes, gateway_at

    def gateway(self) -> str:
        return f"http://{HOST}:{GATEWAY_PORT}"

    def predict(self, prompt: Prompt, admin: str = GATEWAY_ADMIN) -> Seen:
        """What the gateway expects of the engine that computes prompts."""
        answer = post(admin, f"/debug/predict{prompt.path}", prompt.body).ok()
        assert "engines" in answer, f"{prompt.name}: no prediction: {answer}"
        (entry,) = [engine for engine in answer["engines"] if engine["role"] != "decode"]
        tiers = (entry[f"{tier}_tokens"] for tier in ("l1", "l2", "l3"))
        return Seen(prompt.name, answer["input_tokens"], *tiers)

    def ask(self, prompt: Prompt) -> tuple[Seen, dict]:
        """Predicts, sends, and looks what the engine has found."""
        self.settle()
        seen = self.predict(prompt)
        before = self._prompt_tokens()
        answer = post(self.gateway(), prompt.path, prompt.body).ok()
        usage = answer["usage"]
        assert usage["prompt_tokens"] == seen.tokens, f"{prompt.name}: {seen.tokens} tokens predicted, {usage} told"
        if self.pair.engine == "sglang":
            # Decode repeats what prefill told.
            seen.found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return seen, answer
        # Decode tells its own hits, so the prefill is asked. Its numbers come a moment after its answer.
        deadline = time.monotonic() + 10
        while (now := self._prompt_tokens())[0] - before[0] < seen.tokens and time.monotonic() < deadline:
            time.sleep(0.02)
        assert now[0] - before[0] == seen.tokens, f"{prompt.name}: prefill counts {now[0] - before[0]:g} prompt tokens"
        seen.found = round(now[1] - before[1])
        return seen, answer

    def _prompt_tokens(self) -> tuple[float, float]:
        """Prompt tokens of vLLM's prefill since its start: all, and those that were in a cache."""
        if self.pair.engine == "sglang":
            return 0, 0
        metrics = Metrics(PREFILL)
        name = "vllm:prompt_tokens_by_source_total"
        computed = metrics.sum(name, 'source="local_compute"')
        cached = metrics.sum(name, 'source="local_cache_hit"') + metrics.sum(name, 'source="external_kv_transfer"')
        return computed + cached, cached

    @staticmethod
    def unconfirmed() -> float:
        """Prompts for which the store's master did not answer the gateway in its few milliseconds."""
        return Metrics(GATEWAY_ADMIN).sum("moongate_store_confirmation_failures_total")

    def settle(self) -> None:
        """Waits until the entry is idle and the store has what was computed."""
        api, last, since = APIS[self.pair.engine], None, time.monotonic()
        deadline = since + 20
        while time.monotonic() - since < QUIET_SECONDS and time.monotonic() < deadline:
            stored = Metrics(MASTER_HTTP).sum("master_key_count") if self.pair.store_node else 0
            now = api.busy(PREFILL), stored
            if now[0] or now != last:
                last, since = now, time.monotonic()
            time.sleep(QUIET_STEP)

    def flush(self) -> None:
        """Empties the entry's own caches; the store keeps what it has."""
        self.settle()
        path = "/flush_cache" if self.pair.engine == "sglang" else "/reset_prefix_cache"
        # SGLang refuses until it has given up what it wants of a store that does not answer.
        deadline = time.monotonic() + 90
        while (answer := post(PREFILL, path, {})).status != 200:
            assert time.monotonic() < deadline, f"{path}: HTTP {answer.status}: {answer.body[:200]!r}"
            time.sleep(0.2)
        # vLLM publishes what happened with its next step, and only requests make it step.
        if self.pair.engine == "vllm":
            post(PREFILL, COMPLETIONS, completion("", [7]).body).ok()
        time.sleep(QUIET_SECONDS)


Check = Callable[[Hits], "str | None"]
HIT_CHECKS: list[Check] = []


def check(function: Check) -> Check:
    HIT_CHECKS.append(function)
    return function


@check
def tokens_of_chats(hits: Hits) -> str:
    """The gateway makes the same token ids of a chat as the engine."""
    deadline = time.monotonic() + 60
    while "message" in (first := post(GATEWAY_ADMIN, f"/debug/tokens{CHAT}", renderings()[0][1]).ok()):
        assert time.monotonic() < deadline, f"the tokenizer is not loaded: {first}"
        time.sleep(0.2)
    wrong, total = [], 0
    for name, body in renderings():
        theirs = post(PREFILL, "/tokenize", body).ok()["tokens"]
        answer = post(GATEWAY_ADMIN, f"/debug/tokens{CHAT}", body).ok()
        ours = answer.get(hits.pair.engine)
        total += len(theirs)
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours or [], theirs)) if a != b), len(theirs))
            wrong.append(f"{name}: {ours and ours[at - 3 : at + 12]} instead of {theirs[at - 3 : at + 12]} {answer.get('why', '')}")
    assert not wrong, "; ".join(wrong)
    return f"{len(renderings())} chats, {total} tokens"


def _without_a_tokenizer(processes: Processes) -> dict[str, tuple[list[str], bool]]:
    """Flags for tokens of texts, and whether engines are then asked for them."""
    # A folder without the file would end the gateway.
    unusable = processes.logs / "unusable-tokenizer"
    unusable.mkdir(exist_ok=True)
    (unusable / "tokenizer.json").write_text("{}")
    return {
        "the engine's folder": (["--tokenize-timeout", "0s"], False),
        "asked": (["--model", f"tiny={unusable}", "--tokenize-timeout", "30s"], True),
    }


@check
def tokens_without_a_tokenizer(hits: Hits) -> str:
    """A gateway that is given no tokenizer has the same token ids: with the engine's own folder, or by asking engines."""
    bodies = [(name, CHAT, body) for name, body in renderings()]
    bodies += [(one.name, one.path, one.body) for one in prompts() if isinstance(one.body.get("prompt"), str)]
    notes = []
    for how, (flags, asks) in _without_a_tokenizer(hits.processes).items():
        # vLLM tells its model's folder, also when it has the tokenizer from elsewhere.
        if not asks and hits.pair.tokens_only and hits.pair.engine == "vllm":
            continue
        running = hits.processes.start(hits.gateway_at("gateway-tokens", GATEWAY_PORT + 20, flags))
        try:
            hits.processes.await_ready(running)
            admin = f"http://{HOST}:{GATEWAY_PORT + 21}"
            deadline = time.monotonic() + 60
            while "message" in (first := post(admin, f"/debug/tokens{CHAT}", bodies[0][2]).ok()):
                assert time.monotonic() < deadline, f"{how}: {first}"
                time.sleep(0.2)
            for name, path, body in bodies:
                wanted = post(GATEWAY_ADMIN, f"/debug/tokens{path}", body).ok()
                found = post(admin, f"/debug/tokens{path}", body).ok()
                assert found == wanted and hits.pair.engine in found, f"{how}, {name}: {found} instead of {wanted}"
            asked = Metrics(admin).sum("moongate_tokenize_engine_seconds_count")
            seconds = Metrics(admin).sum("moongate_tokenize_engine_seconds_sum")
            assert (asked > 0) == asks, f"{how}: {asked} questions"
            notes.append(f"{how}: {len(bodies)} prompts, {asked:g} questions in {seconds:.2f} s")
        finally:
            hits.processes.stop(running)
    return "; ".join(notes)


@check
def mixed_prompts(hits: Hits) -> str:
    """Every prompt is predicted as the engine finds it, and the gateway's own count says the same."""
    before = _counts()
    tally = Tally([hits.ask(prompt)[0] for prompt in prompts()])
    hits.settle()
    note = f"{tally.text()}; {hits.unconfirmed():g} not confirmed"
    counted = [int(now - then) for now, then in zip(_counts(), before)]
    tokens = sum(one.tokens for one in tally.seen)
    assert counted[0] == tokens, f"the gateway compared {counted[0]} tokens of {tokens}; {note}"
    note += f"; the gateway counts {counted[1]} missed, {counted[2]} false"
    # It predicts when the request arrives, a moment after the prediction of this check.
    differ = abs(counted[1] - tally.missed) + abs(counted[2] - tally.false)
    assert differ <= (1 - RIGHT) * tokens, note
    return note


def _counts() -> list[float]:
    metrics = Metrics(GATEWAY_ADMIN)
    names = ("compared", "false_negative", "false_positive")
    return [metrics.sum(f"moongate_prediction_{name}_tokens_total") for name in names]


@check
def growing_chats(hits: Hits) -> str:
    """Conversations that go on with the engine's own answers, in turns."""
    tally = Tally()
    chats = [[{"role": "system", "content": text(50 + i, 60 * i)}] for i in range(3)]
    for turn in range(5):
        for number, messages in enumerate(chats):
            messages.append({"role": "user", "content": text(100 * turn + number, 20 + 30 * turn)})
            seen, answer = hits.ask(chat(f"chat {number}, turn {turn}", messages, max_tokens=40))
            tally.seen.append(seen)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return tally.text()


@check
def evicted_pages(hits: Hits) -> str:
    """What had to leave the device is found where it still is: SGLang's host memory, or the store."""
    hits.flush()
    kept = [completion(f"{length} ids", ids(9000 + length, length)) for length in (200, 600)]
    others = [completion("1999 other ids", ids(9100 + number, 1999)) for number in range(9)]
    tally = Tally([hits.ask(prompt)[0] for prompt in [*kept, *others, *reversed(kept)]])
    assert all(one.l1 == 0 and one.predicted > 0 for one in tally.seen[-2:]), f"nothing was evicted: {tally.seen[-2:]}"
    return tally.text()


@check
def hits_in_the_store(hits: Hits) -> str:
    """After the engine's own caches were emptied, what it has is in the store."""
    hits.flush()
    tally = Tally([hits.ask(prompt)[0] for prompt in prompts()])
    for prompt in prompts()[::4]:
        hits.flush()
        seen, _ = hits.ask(prompt)
        assert seen.l1 == seen.l2 == 0, f"own pages after the flush: {seen}"
        tally.seen.append(seen)
    assert sum(one.l3 for one in tally.seen) > 0, "nothing was predicted in the store"
    return tally.text()


@check
def a_late_gateway(hits: Hits) -> str:
    """A gateway that starts now knows the same as the one that has seen everything."""
    return check_late(hits, lambda admin: [hits.predict(prompt, admin) for prompt in prompts()])


def check_late(
    hits: Hits,
    expected: Callable[[str], list[Seen]],
    same: Callable[[list[Seen], list[Seen]], bool] = list.__eq__,
) -> str:
    """Compares what `expected` reads from the admin address of a gateway that starts now and of the first one."""
    hits.settle()
    server = hits.gateway_at("gateway-late", GATEWAY_PORT + 10)
    running = hits.processes.start(server)
    seconds = hits.processes.await_ready(running)
    admin = f"http://{HOST}:{GATEWAY_PORT + 11}"
    start = time.monotonic()
    wanted = expected(GATEWAY_ADMIN)
    try:
        while not (late := _try(lambda: expected(admin))) or not same(late, wanted):
            if time.monotonic() - start > 20:
                differ = [f"\n    {a} instead of {b}" for a, b in zip(late or [], wanted) if a != b]
                raise AssertionError(f"{len(differ)} of {len(wanted)} predictions differ" + "".join(differ[:10]))
            time.sleep(0.2)
    finally:
        hits.processes.stop(running)
    own, stored = sum(one.l1 + one.l2 for one in wanted), sum(one.l3 for one in wanted)
    return f"{len(wanted)} predictions, {own} tokens in the engine and {stored} in the store, {time.monotonic() - start:.1f} s after it was ready ({seconds:.1f} s)"


def _try(what: Callable[[], list[Seen]]) -> list[Seen] | None:
    try:
        return what()
    except AssertionError:
        return None


@check
def a_killed_store_node(hits: Hits) -> str:
    """Pages on a node that died are not expected, though the master lists them for ten more seconds."""
    # New ones: the store spreads their pages over all nodes.
    sent = [completion(f"{length} ids", ids(7000 + length, length)) for length in (1000, 1024, 1999, 2000)]
    for prompt in sent:
        hits.ask(prompt)
    hits.flush()
    before = sum(hits.predict(prompt).l3 for prompt in sent)
    unconfirmed = hits.unconfirmed()
    (node,) = [running for running in hits.processes.running if running.server.name == "store-node"]
    dead = time.monotonic()
    hits.processes.kill(node)
    while (after := sum(hits.predict(prompt).l3 for prompt in sent)) == before:
        assert time.monotonic() - dead < 8, f"{before} tokens in the store are still expected"
        time.sleep(0.1)
    note = f"{before} tokens expected in the store, and {after} of them {time.monotonic() - dead:.1f} s after the end"
    note += f" ({unconfirmed:g} prompts were not confirmed before)"
    # Until the master forgets them, vLLM counts pages as found that it then fails to read.
    early = Tally([hits.ask(prompt)[0] for prompt in sent[:2]])
    assert early.false == 0, f"{note}; {early}"
    time.sleep(max(0.0, 15 - (time.monotonic() - dead)))
    hits.flush()
    late = Tally([hits.ask(prompt)[0] for prompt in sent])
    return f"{note}; then none of {sum(one.predicted for one in early.seen)} false; after 15 s {late.text()}"


@check
def a_restarted_master(hits: Hits) -> str:
    """A master that starts again knows no page, and the gateway expects none from it for long."""
    sent = [completion(f"{length} ids", ids(8000 + length, length)) for length in (1000, 1024, 1999, 2000)]
    for prompt in sent:
        hits.ask(prompt)
    hits.flush()
    tally = Tally([hits.ask(prompt)[0] for prompt in sent])
    assert tally.seen[0].l3 > 0, f"nothing is expected in the store: {tally.seen}"
    hits.flush()
    (master,) = [running for running in hits.processes.running if running.server.name == "master"]
    hits.processes.kill(master)
    gone = time.monotonic()
    # Without a master the engines find nothing in the store.
    while any(hits.predict(prompt).l3 for prompt in sent):
        assert time.monotonic() - gone < 20, "pages are still expected 20 s after the master's end"
        time.sleep(0.2)
    down = time.monotonic() - gone
    start = time.monotonic()
    hits.processes.await_ready(hits.processes.start(master.server))
    while any(hits.predict(prompt).l3 for prompt in sent):
        assert time.monotonic() - start < 30, "pages are still expected 30 s after the master's start"
        time.sleep(0.2)
    seconds = time.monotonic() - start
    # The engines bring their memory back within ten seconds.
    time.sleep(max(0.0, 15 - seconds))
    again = Tally([hits.ask(prompt)[0] for prompt in sent])
    hits.flush()
    stored = Tally([hits.ask(prompt)[0] for prompt in sent])
    note = f"none expected {down:.1f} s after its end, {seconds:.1f} s after its start"
    return f"{note}; before {tally.text()}; then {again.text()}; stored again {stored.text()}"


TOKEN_CHECKS: list[Check] = [tokens_of_chats, tokens_without_a_tokenizer]
