"""One engine with two data-parallel ranks behind one address. Each has a KV cache of its own; the gateway chooses the rank."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Callable

from addresses import GATEWAY_ADMIN, PREFILL, PREFILL_EVENTS_PORT, PREFILL_PORT
from hits import Hits, Seen, Tally, check_late
from pairs import SMALL_KV_BYTES, Pair, events, vllm
from prompts import COMPLETIONS, Prompt, chat, completion, ids, prompts, text
from talk import Metrics, connect, post

RANKS = 2
# Ports of a rank's events are those of rank 0 plus its number, and replays start ten ports above.
assert RANKS <= 10
EVENT_SECONDS = 5


def vllm_dp(installed: Path, _logs: Path) -> Pair:
    """The engine balances requests itself, unless the header names a rank."""
    flags = [*events(PREFILL_EVENTS_PORT), "--data-parallel-size", str(RANKS), "--api-server-count", "1"]
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, None, {}, flags, kv_bytes=SMALL_KV_BYTES),
        decode=None,
        predicted=installed / "model/tiny-qwen3",
    )


def predicted(prompt: Prompt, admin: str = GATEWAY_ADMIN) -> list[Seen]:
    """What the gateway expects in each rank."""
    answer = post(admin, f"/debug/predict{prompt.path}", prompt.body).ok()
    assert "engines" in answer, f"{prompt.name}: no prediction: {answer}"
    by_rank = {int(engine["instance"].rpartition("#")[2]): engine for engine in answer["engines"]}
    assert sorted(by_rank) == list(range(RANKS)), f"ranks of the gateway: {answer['engines']}"
    tiers = ("l1", "l2", "l3")
    return [
        Seen(f"{prompt.name}, rank {rank}", answer["input_tokens"], *(by_rank[rank][f"{tier}_tokens"] for tier in tiers))
        for rank in range(RANKS)
    ]


def counted() -> list[tuple[float, float]]:
    """By rank: prompt tokens since the engine's start, and those of them that were cached."""
    samples = Metrics(PREFILL).samples
    counts = []
    for rank in range(RANKS):
        by_source = {
            match[1]: value
            for name, labels, value in samples
            if name == "vllm:prompt_tokens_by_source_total" and f'engine="{rank}"' in labels
            if (match := re.search(r'source="(\w+)"', labels))
        }
        cached = by_source.get("local_cache_hit", 0)
        counts.append((by_source.get("local_compute", 0) + cached, cached))
    return counts


def ask(hits: Hits, prompt: Prompt, rank: int | None = None) -> tuple[int, Seen, dict]:
    """The rank that computed a prompt, the prediction for it with what was found, and the answer.

    With `rank`, the request goes past the gateway to that rank.
    """
    hits.settle()
    expected, before = predicted(prompt), counted()
    answer = post(hits.gateway(), prompt.path, prompt.body).ok() if rank is None else _direct(prompt, rank)
    deadline = time.monotonic() + 10
    while True:
        changes = [(now[0] - then[0], now[1] - then[1]) for now, then in zip(counted(), before)]
        total = sum(tokens for tokens, _ in changes)
        if total >= expected[0].tokens or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    used = [number for number, (tokens, _) in enumerate(changes) if tokens]
    assert len(used) == 1 and total == expected[0].tokens, f"{prompt.name}: the ranks count {changes}"
    assert rank in (None, used[0]), f"{prompt.name}: rank {used[0]} instead of {rank}"
    seen = expected[used[0]]
    seen.found = round(changes[used[0]][1])
    return used[0], seen, answer


def _direct(prompt: Prompt, rank: int) -> dict:
    connection = connect(PREFILL)
    try:
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        connection.request("POST", prompt.path, json.dumps(prompt.body), headers)
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, f"rank {rank}: HTTP {response.status}: {body[:500]!r}"
        return json.loads(body)
    finally:
        connection.close()


def _by_rank(tallies: list[Tally]) -> str:
    """The note of a check in which every rank has computed and found prompts."""
    for rank, tally in enumerate(tallies):
        assert tally.seen, f"rank {rank} got no request"
        assert sum(one.found for one in tally.seen), f"rank {rank} found nothing"
    return "; ".join(f"rank {rank}: {tally.text()}" for rank, tally in enumerate(tallies))


def repeated_prompts_by_rank(hits: Hits) -> str:
    """Prompts of all kinds, twice: each is predicted for the rank that then computes it."""
    tallies = [Tally() for _ in range(RANKS)]
    for prompt in [*prompts()[22:], *prompts()[22:]]:
        rank, seen, _ = ask(hits, prompt)
        tallies[rank].seen.append(seen)
    return _by_rank(tallies)


def growing_chats_by_rank(hits: Hits) -> str:
    """Conversations that go on with the engine's answers. Each begins on a rank, past the gateway, which then sends it there."""
    tallies = [Tally() for _ in range(RANKS)]
    chats = [[{"role": "system", "content": text(350 + i, 150 + 60 * i)}] for i in range(4)]
    for turn in range(4):
        for number, messages in enumerate(chats):
            home = number % RANKS
            messages.append({"role": "user", "content": text(100 * turn + 10 + number, 20 + 30 * turn)})
            prompt = chat(f"chat {number}, turn {turn}", messages, max_tokens=40)
            rank, seen, answer = ask(hits, prompt, None if turn else home)
            assert rank == home, f"{prompt.name}: rank {rank} instead of {home}"
            tallies[rank].seen.append(seen)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return _by_rank(tallies)


def evictions_of_one_rank(hits: Hits) -> str:
    """Prompts of both ranks, until one rank has evicted them: they are expected in the other one only, and found there."""
    kept = [completion(f"{length} ids kept", ids(9500 + length, length)) for length in (300, 900)]
    for prompt in kept:
        for rank in range(RANKS):
            ask(hits, prompt, rank)
    whole = [predicted(prompt) for prompt in kept]
    assert all(one.l1 == (one.tokens - 1) // 32 * 32 for ranks in whole for one in ranks), f"not in both ranks: {whole}"
    for number in range(11):
        ask(hits, completion("1999 other ids", ids(9600 + number, 1999)), 0)
    deadline = time.monotonic() + EVENT_SECONDS
    while any(left := [predicted(prompt)[0].l1 for prompt in kept]):
        assert time.monotonic() < deadline, f"rank 0 still has tokens of these prompts: {left}"
        time.sleep(0.1)
    other = [predicted(prompt)[1] for prompt in kept]
    assert [one.l1 for one in other] == [ranks[1].l1 for ranks in whole], f"rank 1 lost blocks of rank 0: {other}"
    tallies = [Tally([ask(hits, prompt, rank)[1] for prompt in kept]) for rank in range(RANKS)]
    assert not any(one.found for one in tallies[0].seen), f"rank 0 has not evicted them: {tallies[0].seen}"
    return "; ".join(f"rank {rank}: {tally.text()}" for rank, tally in enumerate(tallies))


def a_late_gateway_by_rank(hits: Hits) -> str:
    """A gateway that starts now has the same predictions for each rank."""
    def expected(admin: str) -> list[Seen]:
        return [one for prompt in prompts() for one in predicted(prompt, admin)]

    note = check_late(hits, expected)
    by_rank = [sum(one.l1 for one in expected(GATEWAY_ADMIN)[rank::RANKS]) for rank in range(RANKS)]
    assert all(by_rank), f"tokens expected by rank: {by_rank}"
    return f"{note}; by rank {by_rank}"


VLLM_RANK_CHECKS: list[Callable[[Hits], str]] = [
    repeated_prompts_by_rank,
    growing_chats_by_rank,
    a_late_gateway_by_rank,
    evictions_of_one_rank,
]
