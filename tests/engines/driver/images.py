"""Prompts with images: their length at first sight, and what the engine has of them when they return."""

from __future__ import annotations

import base64
import random
import struct
import threading
import time
import zlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from addresses import GATEWAY_ADMIN, GATEWAY_PORT, HOST, PREFILL
from hits import Hits, Tally
from prompts import CHAT, Prompt, chat, text
from talk import Metrics, post

# Share of the tokens by which the length of a prompt may be wrong while its images are new.
LENGTH_ERROR = 0.1
# Prompts with images whose size in tokens the gateway cannot know before an engine returns it.
UNKNOWN_SIZES = ["an address", "a changed size"]
IMAGES_PORT = 8300


def png(width: int, height: int, seed: int) -> bytes:
    """Lines of random colours."""
    draw = random.Random(seed)
    lines = b"".join(b"\0" + draw.randbytes(3) * width for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def image(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def data(width: int, height: int, seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(width, height, seed)).decode()


def words(seed: int, count: int) -> dict:
    return {"type": "text", "text": text(seed, count)}


def conversation(name: str, content: list[dict], system: str = "", **more) -> Prompt:
    first = [{"role": "system", "content": system}] if system else []
    return chat(name, [*first, {"role": "user", "content": content}], **more)


class Images(BaseHTTPRequestHandler):
    """Serves /WIDTH/HEIGHT/SEED.png; counts its requests."""

    count = 0

    def do_GET(self) -> None:  # noqa: N802
        Images.count += 1
        body = png(*(int(number) for number in self.path.strip("/").removesuffix(".png").split("/")))
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments) -> None:
        pass


def _mix() -> list[Prompt]:
    one, two = data(640, 480, 1), data(300, 900, 2)
    served = f"http://{HOST}:{IMAGES_PORT}/500/333/3.png"
    system = text(40, 150)
    return [
        conversation("one image", [image(one)]),
        conversation("text before the image", [words(41, 120), image(one), words(42, 10)], system),
        conversation("two images", [words(43, 20), image(one), words(44, 30), image(two), words(45, 40)]),
        conversation("two other images", [image(data(280, 280, 4)), image(data(56, 56, 5)), words(46, 40)]),
        conversation("the same image twice", [image(two), image(two), words(46, 40)]),
        conversation("an image in another conversation", [words(47, 33), image(one), words(42, 10)], text(48, 77)),
        conversation("another image with the same text", [words(41, 120), image(data(640, 480, 6)), words(42, 10)], system),
        conversation("small images", [image(data(30, 30, seed)) for seed in range(60, 64)]),
        conversation("an address", [words(49, 50), image(served), words(42, 10)]),
        conversation("a name", [words(49, 50), image(one, uuid="the client's name"), words(42, 10)]),
        conversation("with a salt", [words(41, 60), image(one), words(42, 10)], cache_salt="tenant-ß"),
        conversation("a changed size", [image(one)], mm_processor_kwargs={"size": {"shortest_edge": 3136, "longest_edge": 100_000}}),
        conversation("the first message", [words(50, 60), image(two)], system),
        chat(
            "a further message with a further image",
            [
                {"role": "system", "content": system},
                {"role": "user", "content": [words(50, 60), image(two)]},
                {"role": "assistant", "content": text(51, 30)},
                {"role": "user", "content": [image(data(400, 200, 7)), words(52, 20)]},
            ],
        ),
    ]


def lengths_at_first_sight(hits: Hits) -> str:
    """A new image has about the tokens that the engine counts, and nothing but the text before it is expected in the cache."""
    notes, worst = [], 0.0
    _await_tokenizer()
    for prompt in _mix():
        hits.settle()
        seen = hits.predict(prompt)
        # What the engine then has includes images of earlier prompts, whose tokens are already known.
        usage = post(hits.gateway(), prompt.path, prompt.body).ok()["usage"]
        error = abs(seen.tokens - usage["prompt_tokens"]) / usage["prompt_tokens"]
        has_size = prompt.name not in UNKNOWN_SIZES
        worst = max(worst, error) if has_size else worst
        if has_size and error > LENGTH_ERROR:
            notes.append(f"{prompt.name}: {seen.tokens} tokens expected instead of {usage['prompt_tokens']}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if seen.predicted > cached:
            notes.append(f"{prompt.name}: {seen.predicted} tokens expected in the cache instead of {cached}")
        _await_queries()
    assert not notes, "; ".join(notes)
    return f"{len(_mix())} prompts, at most {worst:.1%} wrong"


def _await_tokenizer(admin: str = GATEWAY_ADMIN) -> None:
    deadline = time.monotonic() + 60
    probe = conversation("probe", [image(data(100, 100, 99))])
    while "message" in (answer := post(admin, f"/debug/predict{CHAT}", probe.body).ok()):
        assert time.monotonic() < deadline, f"the tokenizer is not loaded: {answer}"
        time.sleep(0.2)


def _await_queries() -> None:
    """Waits until all images are known."""
    last, deadline = -1.0, time.monotonic() + 30
    while (now := Metrics(GATEWAY_ADMIN).sum("moongate_media_queries_total")) != last:
        assert time.monotonic() < deadline, f"{now:g} queries, and more"
        last = now
        time.sleep(1)


def prompts_with_images(hits: Hits) -> str:
    """Images that were seen before: exact tokens and hits, also in prompts that are new."""
    queries = partial(Metrics(GATEWAY_ADMIN).sum, "moongate_media_queries_total")
    before = queries('result="learned"')
    tally = Tally([hits.ask(prompt)[0] for prompt in _mix()])
    again = [hits.ask(prompt)[0] for prompt in reversed(_mix())]
    one = data(640, 480, 1)
    new = [
        conversation("a new text", [words(70, 90), image(one)]),
        conversation("a new text again", [words(70, 90), image(one), words(71, 90)]),
        conversation("images in another order", [image(data(300, 900, 2)), image(one), words(71, 90)]),
        conversation("the same beginning", [image(data(300, 900, 2)), image(one), words(72, 90)]),
    ]
    tally.seen += [*again, *(hits.ask(prompt)[0] for prompt in new)]
    assert sum(one.found for one in again) > 0.9 * sum(one.tokens for one in again), "they do not return to the cache"
    metrics = Metrics(GATEWAY_ADMIN)
    learned = metrics.sum("moongate_media_queries_total", 'result="learned"')
    assert learned == before, f"{learned - before:g} images were queried again"
    assert metrics.sum("moongate_media_queries_total") == learned, "queries failed"
    exact, estimated = (metrics.sum("moongate_prompt_media_total", f'tokens="{how}"') for how in ("exact", "estimated"))
    return f"{tally.text()}; {learned:g} images queried, {exact:g} exact, {estimated:g} estimated"


def tokens_of_images(hits: Hits) -> str:
    """The gateway's token ids of a known image are those of the engine."""
    compared = 0
    for prompt in _mix():
        theirs = post(PREFILL, f"{CHAT}/render", {**prompt.body, "mm_payload": "none"}).ok()["token_ids"]
        answer = post(GATEWAY_ADMIN, f"/debug/tokens{CHAT}", prompt.body).ok()
        assert answer.get("vllm") == theirs, f"{prompt.name}: other tokens, or none: {str(answer)[:200]}"
        compared += len(theirs)
    return f"{len(_mix())} prompts, {compared} tokens"


def text_in_place_of_an_image(hits: Hits) -> str:
    """A client's text with the name of the placeholder: the prediction ends before the first image."""
    one = data(640, 480, 1)
    pad = {"type": "text", "text": "<|image_pad|>"}
    prompt = conversation("the placeholder's name", [words(80, 90), pad, image(one)])
    post(hits.gateway(), prompt.path, prompt.body).ok()
    hits.settle()
    seen = hits.predict(prompt)
    found = post(hits.gateway(), prompt.path, prompt.body).ok()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < seen.predicted <= found, f"{seen}, and the engine has {found}"
    return f"{seen.predicted} of {found} cached tokens expected"


def without_queries(hits: Hits) -> str:
    """A gateway that does not query engines expects only what is before the first image."""
    flags = ["--model", f"tiny={hits.pair.predicted}", "--tokenize-timeout", "0s"]
    running = hits.processes.start(hits.gateway_at("gateway-without-queries", GATEWAY_PORT + 10, flags))
    hits.processes.await_ready(running)
    admin = f"http://{HOST}:{GATEWAY_PORT + 11}"
    try:
        _await_tokenizer(admin)
        hits.settle()
        # The blocks that the engine has come with a replay of its events.
        time.sleep(2)
        expected = 0
        for prompt in _mix():
            seen, known = hits.predict(prompt, admin), hits.predict(prompt)
            content = prompt.body["messages"]
            first = next(i for i, message in enumerate(content) if isinstance(message["content"], list))
            before = [*content[:first], {**content[first], "content": _before_image(content[first]["content"])}]
            limit = post(PREFILL, "/tokenize", {"model": "tiny", "messages": before}).ok()["count"]
            assert seen.predicted <= min(limit, known.predicted), f"{seen}, the text before it has {limit}; {known}"
            expected += seen.predicted
        queried = Metrics(admin).sum("moongate_media_queries_total")
        assert expected > 0 and queried == 0, f"{expected} tokens expected, {queried:g} queries"
        return f"{expected} tokens expected"
    finally:
        hits.processes.stop(running)


def _before_image(parts: list[dict]) -> list[dict]:
    first = next(i for i, part in enumerate(parts) if part["type"] == "image_url")
    return parts[:first] or [{"type": "text", "text": ""}]


class ServedImages:
    """Runs checks with a server of images."""

    def __init__(self, check):
        self.check, self.__name__ = check, check.__name__

    def __call__(self, hits: Hits) -> str:
        server = ThreadingHTTPServer((HOST, IMAGES_PORT), Images)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            return f"{self.check(hits)}; {Images.count} downloads"
        finally:
            server.shutdown()
            server.server_close()


IMAGE_CHECKS = [
    ServedImages(check)
    for check in (
        lengths_at_first_sight,
        prompts_with_images,
        tokens_of_images,
        text_in_place_of_an_image,
        without_queries,
    )
]
