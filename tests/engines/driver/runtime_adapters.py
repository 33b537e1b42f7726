"""Adapters that the gateway has the engine load when a request needs them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from addresses import GATEWAY_ADMIN, PREFILL
from hits import Hits, Tally
from prompts import Prompt, completion, ids
from talk import Answer, Metrics, get, post

# Loaded at run time; the second one has no folder.
RUNTIME_ADAPTER, BROKEN_ADAPTER = "painter", "missing"
CLIENTS = 4


def adapter_file(folder: Path, adapter: Path) -> Path:
    """The gateway's file of adapters."""
    file = folder / "adapters.toml"
    adapters = {RUNTIME_ADAPTER: adapter, BROKEN_ADAPTER: folder / "nothing"}
    entries = (f'[[adapter]]\nname = "{name}"\npath = "{path}"\nbase = "tiny"\n' for name, path in adapters.items())
    file.write_text("".join(entries))
    return file


def _loads(outcome: str) -> float:
    return Metrics(GATEWAY_ADMIN).sum("moongate_lora_loads_total", f'outcome="{outcome}"')


def _served() -> dict[str, str]:
    return {card["id"]: card["root"] for card in get(PREFILL, "/v1/models").ok()["data"]}


def a_request_loads_its_adapter(hits: Hits) -> str:
    """Requests that arrive together share one load, and the adapter's blocks are predicted then."""
    assert RUNTIME_ADAPTER not in _served(), "it is loaded already"
    sent = completion("500 ids", ids(7000, 500))
    prompt = Prompt(f"{sent.name} of {RUNTIME_ADAPTER}", sent.path, {**sent.body, "model": RUNTIME_ADAPTER})

    def ask(_number: int) -> Answer:
        return post(hits.gateway(), prompt.path, prompt.body)

    start = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for answer in clients.map(ask, range(CLIENTS)):
            assert answer.ok()["model"] == RUNTIME_ADAPTER
    seconds = time.monotonic() - start
    assert _loads("loaded") == 1, f"{_loads('loaded'):g} loads"
    assert _served()[RUNTIME_ADAPTER].endswith(RUNTIME_ADAPTER)
    took = Metrics(GATEWAY_ADMIN).sum("moongate_lora_load_seconds_sum")
    tally = Tally()
    other = completion("600 ids", ids(7100, 600))
    for _ in range(2):
        again = Prompt(f"{other.name} of {RUNTIME_ADAPTER}", other.path, {**other.body, "model": RUNTIME_ADAPTER})
        tally.seen.append(hits.ask(again)[0])
    assert tally.seen[1].found > 500, "the adapter's blocks are not found again"
    return f"{CLIENTS} requests after {seconds:.2f} s, the load {took:.2f} s; {tally.text()}"


def an_adapter_without_a_folder_is_an_error(hits: Hits) -> str:
    """The client gets the engine's reason, and the engine serves other models."""
    sent = completion("", [7])
    answer = post(hits.gateway(), sent.path, {**sent.body, "model": BROKEN_ADAPTER})
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (503, "adapter_load_failed"), f"HTTP {answer.status}: {error}"
    assert _loads("rejected") == 1, f"{_loads('rejected'):g} rejected loads"
    post(hits.gateway(), sent.path, sent.body).ok()
    return error["message"]


RUNTIME_ADAPTER_CHECKS = [a_request_loads_its_adapter, an_adapter_without_a_folder_is_an_error]
