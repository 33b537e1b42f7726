"""Starts servers and stops them again, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

STOP_SECONDS = 20


class StartFailed(Exception):
    pass


@dataclass
class Server:
    """One server: its command, what it needs in the environment, and where it says that it is ready."""

    name: str
    command: list[str]
    ready_url: str
    ready_seconds: int
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    server: Server
    process: subprocess.Popen
    log: Path
    started: float

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


class Processes:
    """Servers started by one run. Leaving the `with` block stops them, last started first."""

    def __init__(self, logs: Path):
        self.logs = logs
        self.running: list[Running] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_error) -> None:
        while self.running:
            self.stop(self.running[-1])

    def start(self, server: Server) -> Running:
        log = self.logs / f"{server.name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                server.command,
                env={**os.environ, **server.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # A session of its own, so that the whole tree of an engine's processes can be signalled.
                start_new_session=True,
            )
        running = Running(server, process, log, time.monotonic())
        self.running.append(running)
        return running

    def await_ready(self, running: Running) -> float:
        """Seconds from start to readiness."""
        server = running.server
        deadline = running.started + server.ready_seconds
        while time.monotonic() < deadline:
            if running.process.poll() is not None:
                text = f"{server.name} ended with {running.process.returncode} before it was ready"
                raise StartFailed(f"{text}; its log {running.log} ends with:\n{running.tail()}")
            if _answers_200(server.ready_url):
                return time.monotonic() - running.started
            time.sleep(0.5)
        text = f"{server.name} was not ready after {server.ready_seconds} s at {server.ready_url}"
        raise StartFailed(f"{text}; its log {running.log} ends with:\n{running.tail()}")

    def kill(self, running: Running) -> None:
        """Ends a server as a crash would."""
        self.running.remove(running)
        _signal_session(running.process.pid, signal.SIGKILL)
        running.process.wait(STOP_SECONDS)

    def stop(self, running: Running) -> None:
        self.running.remove(running)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            _signal_session(running.process.pid, sign)
            try:
                running.process.wait(STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        # Children that outlived their parent.
        _signal_session(running.process.pid, signal.SIGKILL)


def _signal_session(pid: int, sign: signal.Signals) -> None:
    try:
        os.killpg(pid, sign)
    except ProcessLookupError:
        pass


def _answers_200(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
