"""Records an engine's KV events together with the prompts that caused them and the cache hits that it reported.

    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT [MODEL...]
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --images

Each line of OUTPUT is a prompt with its number of cached tokens (and its images: the engine's hash, first token and
length), or the payload of an event in hexadecimal, in the order
in which they happened: a prompt's line comes before the events that it caused. `gateway/src/predict/recordings` replays
them. Needs vLLM's environment, for pyzmq.
"""

import json
import random
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent / "driver"))
QUIET_SECONDS = 1.0


def prompts() -> list[list[int]]:
    """Repeats, shared prefixes, prompts that grow, and enough others to evict something."""
    draw = random.Random(3)

    def ids(length: int) -> list[int]:
        # Small numbers make small recordings.
        return [draw.randrange(1, 128) for _ in range(length)]

    base, other = ids(700), ids(450)
    lengths = [33, 64, 65, 127, 128, 129, 160, 300, 301, 449, 700]
    first = [base[:length] for length in lengths]
    grown = [base[: 200 + 70 * turn] + other[: 20 * turn] for turn in range(6)]
    branches = [base[:250] + ids(40) for _ in range(3)]
    fillers = [ids(700) for _ in range(6)]
    return [*first, *reversed(first), *grown, other, *branches, *grown, *fillers, base, other, *grown]


def image_prompts() -> list[dict]:
    """Chats with images: repeated, in other conversations, several in one block, in another order, with a salt."""
    from images import conversation, data, image, words

    one, two, three = (image(data(*size)) for size in ((280, 200, 1), (112, 336, 2), (28, 28, 3)))
    chats = [
        [one],
        [words(1, 40), one, words(2, 30)],
        [words(1, 40), two, words(2, 30)],
        [words(3, 50), two, words(4, 10), one, words(5, 20)],
        [words(3, 50), one, words(4, 10), two, words(5, 20)],
        [three, three, three, three, words(6, 60)],
        [words(1, 40), one, words(7, 90)],
    ]
    first = [conversation("", content).body for content in chats]
    salted = conversation("", chats[1], cache_salt="s").body
    return [*first, *reversed(first), salted, salted, *first]


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def cached(answer: dict) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def ask(url: str, model: str, prompt: list[int]) -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return {"model": model, "cached": cached(post(f"{url}/v1/completions", body)), "prompt": prompt}


def ask_with_images(url: str, body: dict) -> dict:
    rendered = post(f"{url}/v1/chat/completions/render", {**body, "mm_payload": "none"})
    features = rendered["features"]
    ranges = zip(features["mm_hashes"]["image"], features["mm_placeholders"]["image"])
    media = [[name, place["offset"], place["length"]] for name, place in ranges]
    answer = post(f"{url}/v1/chat/completions", body)
    return {
        "model": body["model"],
        "salt": body.get("cache_salt"),
        "cached": cached(answer),
        "media": media,
        "prompt": rendered["token_ids"],
    }


def main(url: str, endpoint: str, output: str, models: list[str]) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    time.sleep(QUIET_SECONDS)
    with open(output, "w") as out:
        if models == ["--images"]:
            steps = [partial(ask_with_images, url, body) for body in image_prompts()]
        else:
            steps = [partial(ask, url, models[n % len(models)], prompt) for n, prompt in enumerate(prompts())]
        for step in steps:
            print(json.dumps(step()), file=out)
            while socket.poll(QUIET_SECONDS * 1000):
                print(json.dumps({"events": socket.recv_multipart()[2].hex()}), file=out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:] or ["tiny"])
