"""What is expected of `moongate sidecar` beside real engines: registration, a drain under load, a restart, LoRA adapters."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Callable

from addresses import DECODE, GATEWAY, GATEWAY_ADMIN, HOST, PREFILL, SIDECAR_PORT
from apis import APIS, MODEL
from checks import eventually
from pairs import HERE, Pair
from processes import Processes, Running
from talk import connect, get, post

SIDECAR = f"http://{HOST}:{SIDECAR_PORT}"
# An engine that starts on busy cores, beside another one that works.
START_SECONDS = 1800
# Between two requests of a client: without it, the engine that works takes the cores that the other one needs to start.
PAUSE_SECONDS = 0.5


@dataclass
class Beside:
    pair: Pair
    processes: Processes

    @property
    def api(self):
        return APIS[self.pair.engine]

    def engine(self) -> Running:
        """The one that is drained and restarted."""
        return next(running for running in self.processes.running if running.server is self.pair.prefill)


def workers() -> dict[str, dict]:
    return {worker["url"]: worker for worker in get(GATEWAY_ADMIN, "/workers").ok()["workers"]}


def usable(base: str) -> bool:
    return workers().get(base, {}).get("usable", False)


def ask(base: str, method: str, path: str) -> int:
    connection = connect(base, 30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def registered(beside: Beside) -> str:
    seconds = eventually("both engines are used", lambda: usable(PREFILL) and usable(DECODE), 60)
    known = workers()[PREFILL]
    assert (known["worker_type"], known["model_id"], known["source"]) == ("regular", MODEL, "registry"), known
    metrics = get(SIDECAR, "/metrics").body.decode()
    for name in ("moongate_sidecar_engine_up 1", "vllm:num_requests_running{"):
        assert name in metrics, f"no {name} in the metrics"
    return f"after {seconds:.1f} s"


def adapters_come_and_go(beside: Beside) -> str:
    """By the engine's own API, and the gateway serves them."""
    file = beside.pair.lora_file
    adapter = file.parent / "adapter"
    python = beside.pair.prefill.command[0].removesuffix("vllm") + "python"
    subprocess.run([python, str(HERE / "make_adapter.py"), str(adapter)], check=True)
    file.write_text(f"tuned={adapter}\n")

    def served() -> bool:
        return "tuned" in [model["id"] for model in get(GATEWAY, "/v1/models").ok()["data"]]

    loading = eventually("the gateway serves the adapter", served, 60)
    prompt = list(range(3000, 3040))
    body = {**beside.api.body(prompt, 16), "model": "tuned"}
    tuned = post(GATEWAY, beside.api.path, body).ok()["choices"][0]["token_ids"]
    assert tuned != beside.api.ask(GATEWAY, prompt, 16), "the adapter changes nothing"
    file.write_text("")
    eventually("the engine has unloaded it", lambda: b"tuned" not in get(PREFILL, "/v1/models").body, 60)
    eventually("the gateway knows", lambda: not served(), 60)
    return f"loaded within {loading:.1f} s"


def drained_and_restarted_without_a_failed_request(beside: Beside) -> str:
    stop, failures, counts = threading.Event(), [], [0] * 4

    def client(number: int) -> None:
        while not stop.is_set():
            try:
                prompt = list(range(5000 + number * 100 + counts[number], 5040 + number * 100 + counts[number]))
                assert len(beside.api.ask(GATEWAY, prompt, 24)) == 24
                counts[number] += 1
                time.sleep(PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001
                failures.append(f"{type(error).__name__}: {error}")

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
    for thread in clients:
        thread.start()
    eventually("the engine has requests", lambda: beside.api.busy(PREFILL) > 0, 60)
    draining = eventually("drained", lambda: ask(SIDECAR, "POST", "/drain") == 200, 120)
    assert beside.api.busy(PREFILL) == 0, "it said that it is drained"
    assert not usable(PREFILL)
    running = beside.engine()
    beside.processes.stop(running)
    again = beside.processes.start(running.server)
    ready = first_time(lambda: get(PREFILL, "/health").status == 200, START_SECONDS)
    known = first_time(lambda: usable(PREFILL), 60)
    eventually("settled", lambda: ask(SIDECAR, "GET", "/settled") == 200, 60)
    beside.processes.await_ready(again)
    stop.set()
    for thread in clients:
        thread.join(180)
    assert not failures, failures[:3]
    late = known - ready
    assert late < 1, f"used {late:.2f} s after it was ready"
    return f"drained in {draining:.1f} s, used {late:.2f} s after it was ready, {sum(counts)} requests, none failed"


def first_time(condition: Callable[[], bool], seconds: float) -> float:
    """When the condition held first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return time.monotonic()
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s")


BESIDE_CHECKS = [registered, adapters_come_and_go, drained_and_restarted_without_a_failed_request]
