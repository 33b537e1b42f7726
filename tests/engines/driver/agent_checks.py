"""Do predictions hold for the sessions of agents?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, Iterator

from addresses import GATEWAY_ADMIN, PREFILL, PREFILL_EVENTS_PORT, PREFILL_PORT
from agents import MESSAGES, claude_code, codex
from apis import BLOCK
from hits import Hits, Seen, Tally
from pairs import RENDERS, Pair, events, vllm
from prompts import Prompt
from talk import post

# Share of a session's tokens that must be predicted as they are found, and of its hits that may be lost.
RIGHT, LOST = 0.95, 0.01
# Tokens of the longest prompt.
CONTEXT = 32_768

Session = Callable[[Callable[[], dict]], Iterator[Prompt]]


def vllm_agents(installed: Path, _logs: Path) -> Pair:
    """One engine with room for a long session, and with tools."""
    flags = [*events(PREFILL_EVENTS_PORT), *RENDERS]
    worker = vllm(installed, "worker", PREFILL_PORT, None, {}, flags, kv_bytes=256 << 20, context=CONTEXT)
    return Pair(
        engine="vllm", connector=None, prefill=worker, decode=None, predicted=installed / "model/tiny-qwen3"
    )


def _ask(hits: Hits, prompt: Prompt) -> tuple[Seen, dict]:
    hits.settle()
    seen, before = hits.predict(prompt), hits._prompt_tokens()
    answer = post(hits.gateway(), prompt.path, prompt.body).ok()
    deadline = time.monotonic() + 10
    while (now := hits._prompt_tokens())[0] - before[0] < seen.tokens and time.monotonic() < deadline:
        time.sleep(0.02)
    assert now[0] - before[0] == seen.tokens, f"{prompt.name}: {now[0] - before[0]:g} tokens, predicted {seen.tokens}"
    seen.found = round(now[1] - before[1])
    return seen, answer


def _await_tokenizer(probe: Prompt) -> None:
    deadline = time.monotonic() + 60
    while "message" in (answer := post(GATEWAY_ADMIN, f"/debug/tokens{probe.path}", probe.body).ok()):
        assert time.monotonic() < deadline, f"the tokenizer is not loaded: {answer}"
        time.sleep(0.2)


def _tokens(prompt: Prompt) -> list[int]:
    """The gateway's tokens, which must be those of the engine."""
    ours = post(GATEWAY_ADMIN, f"/debug/tokens{prompt.path}", prompt.body).ok()
    assert "vllm" in ours, f"{prompt.name}: {ours}"
    theirs = post(PREFILL, f"{prompt.path}/render", prompt.body).ok()["token_ids"]
    assert ours["vllm"] == theirs, f"{prompt.name}: other tokens, the first at {_common(ours['vllm'], theirs)}"
    return theirs


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _replay(hits: Hits, session: Session) -> str:
    _await_tokenizer(next(session(dict)))
    answers: list[dict] = []
    tally, ideal, last = Tally(), 0, []
    for prompt in session(lambda: answers[-1]):
        tokens = _tokens(prompt)
        # The last token is computed in any case.
        ideal += min(_common(tokens, last), len(tokens) - 1) // BLOCK * BLOCK
        last = tokens
        seen, answer = _ask(hits, prompt)
        tally.seen.append(seen)
        answers.append(answer)
    total, found = sum(one.tokens for one in tally.seen), sum(one.found for one in tally.seen)
    wrong = tally.missed + tally.false
    note = f"{len(answers)} turns, {total} tokens, the last prompt {tally.seen[-1].tokens}; predicted "
    note += f"{sum(one.predicted for one in tally.seen)}, found {found}, ideal {ideal}; {wrong} wrong"
    assert wrong <= (1 - RIGHT) * total, note
    assert found >= ideal - LOST * total, note
    return note


def claude_code_session(hits: Hits) -> str:
    """Thirty turns of Claude Code: tokens, predictions and hits."""
    return _replay(hits, claude_code)


def codex_session(hits: Hits) -> str:
    """Thirty turns of Codex."""
    return _replay(hits, codex)


def tokens_are_counted(hits: Hits) -> str:
    """`count_tokens` gives what the prompt then has."""
    prompt = next(claude_code(dict))
    body = {name: value for name, value in prompt.body.items() if name not in ("max_tokens", "temperature")}
    counted = post(hits.gateway(), f"{MESSAGES}/count_tokens", body).ok()["input_tokens"]
    assert counted == len(_tokens(prompt)), f"{counted} counted"
    return f"{counted} tokens"


AGENT_CHECKS = [claude_code_session, codex_session, tokens_are_counted]
