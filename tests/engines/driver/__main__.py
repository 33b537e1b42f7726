"""Starts one pair of engines with the gateway before it, runs the checks, and stops everything.

Exits with 0 if all passed, and with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from addresses import GATEWAY_PORT, HOST
from alone import prompts_computed_by_decode
from beside import BESIDE_CHECKS, Beside
from checks import CHECKS, Context, warm_up
from direct import StandIn
from hits import HIT_CHECKS, TOKEN_CHECKS, Hits
from own_wheel import engines_use_own_wheel, use_own_wheel
from pairs import PAIRS, Pair
from processes import Processes, Running, Server, StartFailed
from sdks import STORE, sdks, second_turns_are_cached
from store_programs import OWN
from variant_checks import VARIANT_CHECKS
from variants import VARIANTS


def gateway(
    pair: Pair,
    name: str = "gateway",
    port: int = GATEWAY_PORT,
    tokens: list[str] | None = None,
    flags: list[str] | None = None,
) -> Server:
    """Its admin listener is at the next port. `tokens` as in `Pair.gateway_flags`."""
    listen = ["--listen", f"{HOST}:{port}", "--admin-listen", f"{HOST}:{port + 1}"]
    # The engines leave a small machine little time.
    listen += ["--prompt-timeout", "10s"]
    return Server(
        name=name,
        command=[os.environ["MOONGATE_BIN"], "gateway", *listen, *pair.gateway_flags(tokens), *(flags or [])],
        ready_url=f"http://{HOST}:{port}/ready",
        ready_seconds=60,
    )


class Report:
    def __init__(self, mode: str):
        self.mode, self.passed, self.failed = mode, 0, 0

    def run(self, name: str, what) -> bool:
        start = time.monotonic()
        try:
            note = what()
        # A check may fail in any way, and the others still run.
        except Exception as error:  # noqa: BLE001
            self.failed += 1
            self._line("FAIL", name, start, f"{type(error).__name__}: {error}")
            return False
        self.passed += 1
        self._line("ok", name, start, note)
        return True

    def _line(self, result: str, name: str, start: float, note: str | None) -> None:
        end = f": {note}" if note else ""
        print(f"{self.mode}  {result:4} {name.replace('_', ' ')} ({time.monotonic() - start:.1f} s){end}", flush=True)


def stops_cleanly(processes: Processes, running: Running) -> str:
    start = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    code = running.process.wait(30)
    processes.stop(running)
    assert code == 0, f"the gateway ended with {code}; its log ends with:\n{running.tail()}"
    return f"in {time.monotonic() - start:.1f} s"


def run_checks(pair: Pair, report: Report, processes: Processes, direct: bool) -> None:
    with contextlib.ExitStack() as stack:
        if direct:
            stack.enter_context(StandIn(pair))
        else:
            running = processes.start(gateway(pair))
            processes.await_ready(running)
        context = Context(pair, gateway=not direct)
        # An engine with another model's tokenizer cannot write what it generates.
        if pair.tokens_only or report.run("warm up", lambda: warm_up(context)):
            given, checks = context, CHECKS
            if pair.predicted:
                given = Hits(pair, processes, partial(gateway, pair))
                checks = TOKEN_CHECKS if pair.tokens_only else VARIANT_CHECKS.get(report.mode, HIT_CHECKS)
            elif pair.lora_file:
                given, checks = Beside(pair, processes), BESIDE_CHECKS
            for check in checks:
                report.run(check.__name__, lambda check=check: check(given))
            if given is context and not (direct or pair.tokens_only):
                checks_behind_other_gateways(context, report, processes)
        if not direct:
            report.run("the gateway stops", lambda: stops_cleanly(processes, running))
    if report.failed:
        for running in processes.running:
            print(f"{report.mode}  log of {running.server.name}: {running.log}", flush=True)


def checks_behind_other_gateways(context: Context, report: Report, processes: Processes) -> None:
    """Each check has a gateway with flags of its own."""
    pair = context.pair
    checks = [("gateway-with-target", ["--tpot-target", "10s"], prompts_computed_by_decode)] if pair.engine == "vllm" else []
    if pair.sdks:
        report.run("second turns are cached", lambda: second_turns_are_cached(context))
        checks.append(("gateway-with-store", STORE, sdks))
    for number, (name, flags, check) in enumerate(checks, 1):
        running = processes.start(gateway(pair, name, GATEWAY_PORT + 10 * number, flags=flags))
        processes.await_ready(running)
        report.run(check.__name__, lambda: check(context, processes, running))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    modes = PAIRS | VARIANTS
    arguments.add_argument("mode", choices=modes)
    arguments.add_argument("--direct", action="store_true", help="a stand-in for the gateway")
    arguments.add_argument("--hold", action="store_true", help="start the engines, and wait for Ctrl-C")
    arguments.add_argument("--our-master", action="store_true", help="`moongate master` for mooncake_master")
    help_of_wheel = "Moongate's wheel for the engines' module mooncake.store, and `moongate store` for mooncake_client"
    arguments.add_argument("--our-wheel", action="store_true", help=help_of_wheel)
    given = arguments.parse_args()
    OWN.master, OWN.node = given.our_master, given.our_wheel
    # So that `with` blocks are left in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    installed = Path(os.environ["MOONGATE_ENGINES_DIR"])
    logs = installed / "logs" / given.mode
    report = Report(given.mode)
    with Processes(logs) as processes:
        pair = modes[given.mode](installed, logs)
        if given.our_wheel:
            if not pair.store_users:
                arguments.error(f"--our-wheel: no engine of {given.mode} has a store")
            use_own_wheel(pair, installed)
        try:
            for server in pair.before:
                processes.await_ready(processes.start(server))
            if pair.store_node:
                processes.await_ready(processes.start(pair.store_node))
            engines = [processes.start(server) for server in pair.engines]
            for engine in engines:
                seconds = processes.await_ready(engine)
                print(f"{given.mode}  {engine.server.name} ready after {seconds:.0f} s", flush=True)
            if given.hold:
                print(f"{given.mode}  holding; enter with: ip netns exec NAME (see ip netns list)", flush=True)
                signal.pause()
            if given.our_wheel:
                report.run("engines use our wheel", lambda: engines_use_own_wheel(pair, processes))
            run_checks(pair, report, processes, given.direct)
        except StartFailed as error:
            print(f"{given.mode}  FAIL {error}", flush=True)
            report.failed += 1
    print(f"{given.mode}  {report.passed} passed, {report.failed} failed", flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
