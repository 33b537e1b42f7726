"""Checks of an SGLang with data-parallel ranks: each rank is an engine of its own, with predictions of its own."""

from __future__ import annotations

import time

from addresses import GATEWAY_ADMIN, GATEWAY_PORT, HOST, PREFILL
from hits import Hits, Seen, Tally, _counts
from prompts import ids, prompts
from talk import get, post

GENERATE = "/generate"
RANKS = 2
# Tokens in the cache of a rank, as `sglang_dp` starts it.
RANK_TOKENS = 16384


def body(prompt: list[int], tokens: int = 4, **more) -> dict:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


def predict(name: str, prompt: list[int], admin: str = GATEWAY_ADMIN) -> list[Seen]:
    """What the gateway expects of every rank, in their order."""
    answer = post(admin, f"/debug/predict{GENERATE}", body(prompt)).ok()
    entries = {engine["instance"]: engine for engine in answer["engines"]}
    ranks = [entries[name] for name in sorted(entries)]
    assert len(ranks) == RANKS and all(f"#{n}" in sorted(entries)[n] for n in range(RANKS)), f"{sorted(entries)}"
    tiers = ("l1_tokens", "l2_tokens", "l3_tokens")
    return [Seen(name, answer["input_tokens"], *(rank[tier] for tier in tiers)) for rank in ranks]


def ask(hits: Hits, name: str, prompt: list[int], rank: int | None = None) -> tuple[int, Seen]:
    """Predicts, sends through the gateway or past it to a rank, and looks which rank has found how much."""
    hits.settle()
    expected = predict(name, prompt)
    to, more = (hits.gateway(), {}) if rank is None else (PREFILL, {"routed_dp_rank": rank})
    meta = post(to, GENERATE, body(prompt, **more)).ok()["meta_info"]
    served = meta["dp_rank"]
    assert rank in (None, served), f"{name}: rank {served} has served what was for {rank}"
    expected[served].found = meta["cached_tokens"]
    return served, expected[served]


def ranks_are_predicted_apart(hits: Hits) -> str:
    """Every prompt is found on the rank that serves it as it was predicted for that rank."""
    tallies = [Tally() for _ in range(RANKS)]
    whole = ids(2100, 2000)
    cuts = [whole[:cut] for cut in (31, 32, 33, 64, 65, 255, 256, 320, 700, 1000, 1999, 2000)]
    others = [ids(2200 + number, 400 + 50 * number) for number in range(6)]
    for number, prompt in enumerate([*cuts, *others, *reversed(cuts), *others, *cuts]):
        served, seen = ask(hits, f"prompt {number}, {len(prompt)} ids", prompt)
        tallies[served].seen.append(seen)
    # The same prompts on the other rank: what one has cached, the other has not.
    for number, prompt in enumerate([*cuts, *others]):
        for rank in range(RANKS):
            tallies[rank].seen.append(ask(hits, f"prompt {number} on rank {rank}", prompt, rank)[1])
    assert all(tally.seen and sum(one.found for one in tally.seen) for tally in tallies), "a rank has served nothing"
    return "; ".join(f"rank {rank}: {tally.text()}" for rank, tally in enumerate(tallies))


def requests_follow_their_rank(hits: Hits) -> str:
    """A prompt that only one rank has cached is sent to that rank."""
    for number in range(2 * RANKS):
        rank, prompt = number % RANKS, ids(2300 + number, 1500)
        ask(hits, f"new on rank {rank}", prompt, rank)
        served, seen = ask(hits, f"again through the gateway, {number}", prompt)
        assert served == rank and seen.found == seen.predicted > 1400, f"rank {served} instead of {rank}: {seen}"
    return f"{2 * RANKS} prompts"


def all_forms_of_prompts(hits: Hits) -> str:
    """Texts, chats and salts of all lengths: by the gateway's own count, for the ranks to which it sends them."""
    hits.settle()
    before, tokens = _counts(), 0
    for prompt in prompts():
        hits.settle()
        tokens += post(hits.gateway(), prompt.path, prompt.body).ok()["usage"]["prompt_tokens"]
    hits.settle()
    compared, missed, false = (int(now - then) for now, then in zip(_counts(), before))
    note = f"{tokens} tokens, {compared} compared, {missed} missed, {false} false"
    assert compared == tokens and missed + false <= 0.01 * tokens, note
    return note


def eviction_on_one_rank(hits: Hits) -> str:
    """What is pushed out on one rank is no longer expected there, and still on the other one."""
    kept = [ids(2400 + number, 900) for number in range(3)]
    for number, prompt in enumerate(kept):
        for rank in range(RANKS):
            ask(hits, f"kept {number}", prompt, rank)
    before = [predict(f"kept {number}", prompt) for number, prompt in enumerate(kept)]
    assert all(rank.l1 >= 896 - 32 for ranks in before for rank in ranks), f"{before}"
    for number in range(RANK_TOKENS // 1999 + 2):
        ask(hits, f"other {number}", ids(2500 + number, 1999), 0)
    hits.settle()
    after = [predict(f"kept {number}", prompt) for number, prompt in enumerate(kept)]
    assert [ranks[1] for ranks in after] == [ranks[1] for ranks in before], f"rank 1 has changed: {after}"
    assert all(ranks[0].predicted == 0 for ranks in after), f"nothing was evicted on rank 0: {after}"
    tally = Tally([ask(hits, f"kept {number}", prompt, rank)[1] for number, prompt in enumerate(kept) for rank in (1, 0)])
    return tally.text()


def a_flush_of_all_ranks(hits: Hits) -> str:
    """The engine can only flush all its ranks at once."""
    prompt = ids(2600, 1000)
    for rank in range(RANKS):
        ask(hits, "flushed", prompt, rank)
    hits.settle()
    before = [rank.l1 for rank in predict("flushed", prompt)]
    assert all(before), f"{before} tokens were expected before the flush"
    hits.flush()
    left = [rank.predicted for rank in predict("flushed", prompt)]
    assert left == [0] * RANKS, f"{left} tokens are still expected"
    tally = Tally([ask(hits, "flushed", prompt, rank)[1] for _ in range(2) for rank in range(RANKS)])
    return tally.text()


def a_late_gateway_of_ranks(hits: Hits) -> str:
    """A gateway that starts now predicts the same for every rank, by the replays of all ranks."""
    hits.settle()
    sent = [ids(2100, 2000), *(ids(2200 + number, 400 + 50 * number) for number in range(6)), ids(2600, 1000)]
    wanted = [predict("late", prompt) for prompt in sent]
    assert any(one.l1 for ranks in wanted for one in ranks), "nothing is cached"
    running = hits.processes.start(hits.gateway_at("gateway-late", GATEWAY_PORT + 10))
    hits.processes.await_ready(running)
    admin, start = f"http://{HOST}:{GATEWAY_PORT + 11}", time.monotonic()
    try:
        while True:
            try:
                late = [predict("late", prompt, admin) for prompt in sent]
            except AssertionError:
                late = None
            if late == wanted:
                break
            assert time.monotonic() - start < 20, f"{late} instead of {wanted}"
            time.sleep(0.2)
    finally:
        hits.processes.stop(running)
    tokens = [sum(ranks[rank].l1 for ranks in wanted) for rank in range(RANKS)]
    return f"{tokens} tokens by rank, {time.monotonic() - start:.1f} s after it was ready"


def hashes_are_confirmed(_hits: Hits) -> str:
    """The ranks are one engine for operators, and the events of all have the hashes that predictions assume."""
    (engine,) = get(GATEWAY_ADMIN, "/workers").ok()["workers"]
    assert engine["block_hashes"] == "confirmed", f"{engine}"
    return engine["id"]


SGLANG_RANK_CHECKS = [
    ranks_are_predicted_apart,
    requests_follow_their_rank,
    all_forms_of_prompts,
    eviction_on_one_rank,
    a_flush_of_all_ranks,
    a_late_gateway_of_ranks,
    hashes_are_confirmed,
]
