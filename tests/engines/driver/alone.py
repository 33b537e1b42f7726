"""Requests that a vLLM decode serves alone, behind a second gateway with a target of the time per token."""

from __future__ import annotations

import random

from addresses import PREFILL
import handover
from checks import Context
from processes import Processes, Running
from talk import Metrics, get


def prompts_computed_by_decode(context: Context, processes: Processes, second: Running) -> str:
    """An idle decode computes prompts itself, and the tokens are the golden ones."""
    address = second.server.ready_url.removesuffix("/ready")
    pair, api = context.pair, context.api

    def prefilled() -> float:
        return Metrics(PREFILL).sum("vllm:request_success_total")

    before = prefilled(), handover.moved_tokens(pair), handover.computed_tokens(pair)
    for case in context.golden:
        got = api.ask(address, case["prompt"], len(case["out"]))
        assert got == case["out"], f"{len(case['prompt'])} tokens: {got} instead of {case['out']}"
    fresh = random.Random(11).sample(range(1000, 100_000), 300)
    api.ask(address, fresh, 4)
    paired = why_pairs(address)
    processes.stop(second)
    requests = prefilled() - before[0]
    moved, computed = handover.moved_tokens(pair) - before[1], handover.computed_tokens(pair) - before[2]
    assert requests == 0, f"the prefill served {requests:g} of the requests: {paired}"
    assert moved == 0 and computed >= len(fresh) - 1, f"{moved:g} tokens moved, {computed:g} computed"
    return f"{len(context.golden) + 1} requests, {computed:g} tokens computed by the decode"


def why_pairs(address: str) -> list[dict]:
    """The candidates of each decision for a pair, and the load of the decode."""
    host, port = address.rsplit(":", 1)
    admin = f"{host}:{int(port) + 1}"
    decisions = get(admin, "/debug/decisions").ok()["decisions"]
    paired = [decision["request_id"] for decision in decisions if decision["decode"]]
    details = [one for request in paired for one in get(admin, f"/debug/decisions/{request}").ok()["decisions"]]
    return [{name: one[name] for name in ("input_tokens", "candidates")} | {"loads": one["snapshot"]["loads"]} for one in details]
