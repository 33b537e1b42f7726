"""Did KV move? What each kind of pair counts, and a control: the same count when nothing should have moved."""

from __future__ import annotations

import random
import threading

from addresses import DECODE, PREFILL
from apis import BLOCK, APIS
from pairs import Pair
from talk import Metrics, post

# Two layers, K and V, one head of 64 numbers of 4 bytes.
KV_BYTES_PER_TOKEN = 2 * 2 * 64 * 4


def moved_tokens(pair: Pair) -> float:
    """Tokens whose KV went from prefill to decode since the engines started."""
    if pair.engine == "sglang":
        # Whole pages.
        megabytes = Metrics(PREFILL).sum("sglang:kv_transfer_total_mb_sum")
        return round(megabytes * (1 << 20) / KV_BYTES_PER_TOKEN)
    return Metrics(DECODE).sum("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


def computed_tokens(pair: Pair) -> float:
    """Prompt tokens that decode computed itself. SGLang's cannot."""
    if pair.engine == "sglang":
        return 0
    return Metrics(DECODE).sum("vllm:prompt_tokens_by_source_total", 'source="local_compute"')


def expected(pair: Pair, prompts: list[list[int]]) -> int:
    """Tokens that must move for prompts that decode has not seen."""
    if pair.engine == "sglang":
        return sum(-(-len(prompt) // BLOCK) * BLOCK for prompt in prompts)
    if pair.connector == "store":
        # Full blocks only, and at least one token is left for decode.
        return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    return sum(len(prompt) for prompt in prompts)


def control(pair: Pair, prompt: list[int], golden: list[int]) -> str:
    """Something that must not count as a hand-over, past the gateway. Returns what was seen."""
    if pair.engine == "sglang":
        return _other_kv_gives_other_tokens(prompt, golden)
    fresh = random.Random(7).sample(range(1000, 100_000), 100)
    before = moved_tokens(pair), computed_tokens(pair)
    APIS["vllm"].ask(DECODE, fresh, 1)
    moved, computed = moved_tokens(pair) - before[0], computed_tokens(pair) - before[1]
    assert moved == 0 and computed >= 99, f"decode alone: {moved:g} tokens moved, {computed:g} computed"
    return f"decode alone computed {computed:g} tokens, and 0 counted as moved"


def _other_kv_gives_other_tokens(prompt: list[int], golden: list[int]) -> str:
    """Decode is told the golden prompt, prefill another of the same length: then the golden tokens must not come."""
    other = list(reversed(prompt))
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": random.getrandbits(62)}
    api = APIS["sglang"]
    prefill = threading.Thread(
        target=post, args=(PREFILL, api.path, {**api.body(other, len(golden)), **room}), daemon=True
    )
    prefill.start()
    got = post(DECODE, api.path, {**api.body(prompt, len(golden)), **room}).ok()["output_ids"]
    prefill.join()
    assert got != golden, "decode gave the golden tokens from another prompt's KV: it did not use it"
    same = sum(a == b for a, b in zip(got, golden))
    return f"with another prompt's KV {same} of {len(golden)} tokens are the golden ones"
