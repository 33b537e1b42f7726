"""A small HTTP client: whole answers, event streams that can be left, and metrics."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any, Iterator
from urllib.parse import urlsplit

# A fresh vLLM takes up to half a minute for its first request on busy cores.
SECONDS = 180


@dataclass
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def ok(self) -> Any:
        """The JSON of a 200."""
        assert self.status == 200, f"HTTP {self.status}: {self.body[:500].decode(errors='replace')}"
        return self.json()


def connect(base: str, seconds: float = SECONDS) -> http.client.HTTPConnection:
    url = urlsplit(base)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=seconds)


def get(base: str, path: str) -> Answer:
    connection = connect(base, 60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


def send(connection: http.client.HTTPConnection, path: str, body: Any) -> http.client.HTTPResponse:
    """Sends JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    return connection.getresponse()


def post(base: str, path: str, body: Any, seconds: float = SECONDS) -> Answer:
    connection = connect(base, seconds)
    try:
        answer = send(connection, path, body)
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


class Stream:
    """An event stream. Leaving the `with` block closes the connection, wherever the stream is."""

    def __init__(self, base: str, path: str, body: dict):
        self.connection = connect(base)
        self.answer = send(self.connection, path, {**body, "stream": True})
        if self.answer.status != 200:
            text = self.answer.read(500).decode(errors="replace")
            self.connection.close()
            raise AssertionError(f"HTTP {self.answer.status}: {text}")
        kind = self.answer.getheader("Content-Type", "")
        assert kind.startswith("text/event-stream"), f"not a stream, but {kind}"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error) -> None:
        self.answer.close()
        self.connection.close()

    def events(self) -> Iterator[dict]:
        """Events up to [DONE], which must come, and be the last."""
        done = False
        for line in self.answer:
            if not line.startswith(b"data:"):
                continue
            assert not done, f"an event after [DONE]: {line[:200]!r}"
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            assert "error" not in event, f"error in the stream: {event}"
            yield event
        assert done, "the stream ended without [DONE]"


SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)


class Metrics:
    """What a server says at /metrics now."""

    def __init__(self, base: str):
        answer = get(base, "/metrics")
        assert answer.status == 200, f"{base}/metrics: HTTP {answer.status}"
        text = answer.body.decode()
        self.samples = [(m["name"], m["labels"] or "", float(m["value"])) for m in SAMPLE.finditer(text)]

    def sum(self, name: str, label: str = "") -> float:
        """Sum of a metric's samples, of those with `label` (as `key="value"`) among their labels."""
        return sum(value for n, labels, value in self.samples if n == name and label in labels)

    def has(self, name: str) -> bool:
        return any(n == name for n, _, _ in self.samples)
