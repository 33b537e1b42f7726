"""A stand-in for the gateway, as plain as the protocols allow: shows that engines and checks are right without it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from addresses import BOOTSTRAP_PORT, DECODE, GATEWAY_PORT, HOST, PREFILL
from pairs import Pair
from talk import connect, get, post


class StandIn:
    """Serves at the gateway's address, or at another port, until the `with` block is left."""

    def __init__(self, pair: Pair, port: int = GATEWAY_PORT):
        class Handler(_Handler):
            legs = staticmethod(_LEGS[pair.connector or pair.engine])

        self.server = ThreadingHTTPServer((HOST, port), Handler)
        self.server.daemon_threads = True

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args) -> None:
        pass

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(data)
        except ValueError:
            return self._answer(400, b'{"error":{"message":"not JSON","code":"invalid_json"}}')
        decode_body = self.legs(self.path, body)
        if isinstance(decode_body, bytes):
            return self._answer(400, decode_body)
        connection = connect(DECODE)
        try:
            connection.request("POST", self.path, json.dumps(decode_body), {"Content-Type": "application/json"})
            self._watch_client(connection.sock)
            answer = connection.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
            self.end_headers()
            # HTTP/1.0: the end of the connection ends the answer.
            while piece := answer.read1(65536):
                self.wfile.write(piece)
        except (OSError, http.client.HTTPException):
            # The client left.
            pass
        finally:
            connection.close()

    def _watch_client(self, decode: socket.socket) -> None:
        """Ends the exchange with decode when the client closes its side."""

        def watch() -> None:
            with contextlib.suppress(OSError):
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    decode.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=watch, daemon=True).start()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)


def _beside(path: str, body: dict) -> None:
    """A prefill that decode does not wait for."""

    def leg() -> None:
        try:
            post(PREFILL, path, body)
        except OSError:
            pass

    threading.Thread(target=leg, daemon=True).start()


def _sglang(path: str, body: dict) -> dict:
    body = {
        **body,
        "bootstrap_host": HOST,
        "bootstrap_port": BOOTSTRAP_PORT,
        "bootstrap_room": random.getrandbits(62),
    }
    prompts = body.get("input_ids", [0])
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
        count = len(prompts)
        body["bootstrap_host"] = [HOST] * count
        body["bootstrap_port"] = [BOOTSTRAP_PORT] * count
        body["bootstrap_room"] = [body["bootstrap_room"] + number for number in range(count)]
    _beside(path, body)
    return body


def _prefill_body(body: dict, params: dict | None) -> dict:
    cut = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return {**cut, "max_tokens": 1, **({"kv_transfer_params": params} if params else {})}


def _several(body: dict) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list)


def _nixl(path: str, body: dict) -> dict | bytes:
    if _several(body):
        return body
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **nulls}
    answer = post(PREFILL, path, _prefill_body(body, asked))
    if answer.status != 200:
        return answer.body
    return {**body, "kv_transfer_params": answer.json()["kv_transfer_params"]}


def _mooncake(path: str, body: dict) -> dict:
    if _several(body):
        return body
    bootstrap = f"http://{HOST}:{BOOTSTRAP_PORT}"
    engine = get(bootstrap, "/query").ok()["0"]["engine_id"]
    transfer = {"transfer_id": f"xfer-{uuid.uuid4()}"}
    _beside(path, _prefill_body(body, {"do_remote_decode": True, "do_remote_prefill": False, **transfer}))
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine,
        **transfer,
    }
    return {**body, "kv_transfer_params": params}


def _store(path: str, body: dict) -> dict | bytes:
    answer = post(PREFILL, path, _prefill_body(body, None))
    return body if answer.status == 200 else answer.body


_LEGS = {"sglang": _sglang, "nixl": _nixl, "mooncake": _mooncake, "store": _store}
