"""Records an engine's KV events together with the prompts that caused them and the cache hits that it reported.

    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT [MODEL...]
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --images
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --few [MODEL...]
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --keys [MODEL...]
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --flushes
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --ranks RANKS
    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT --responses

Each line of OUTPUT is a prompt with its number of cached tokens (and its images: the engine's hash, first token and
length), or the payload of an event in hexadecimal, in the order
in which they happened: a prompt's line comes before the events that it caused. `gateway/src/predict/recordings` replays
them. Needs vLLM's environment, for pyzmq.

`--few`: fewer prompts, twice. `--keys`: the same with extra keys and salts. `--flushes`: the engine's own cache is emptied between
them, for vLLM with LMCache. `--ranks`: each for a data-parallel rank of vLLM; the endpoint is that of rank 0, and those of the others are at
the following ports. `--responses`: with responses of several lengths.
"""

import json
import random
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Callable

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


def few_prompts() -> list[list[int]]:
    """Repeats, shared prefixes and prompts that grow."""
    draw = random.Random(4)
    base, other = ([draw.randrange(1, 128) for _ in range(length)] for length in (600, 300))
    first = [base[:length] for length in (33, 64, 257, 300, 600)]
    grown = [base[: 150 + 90 * turn] + other[: 30 * turn] for turn in range(4)]
    return [*first, *reversed(first), *grown, other, *grown]


def with_responses() -> list[tuple[list[int], int]]:
    """Prompts of whole pages and others, some of which branch off where no window is left, with the length of the response; and then
    their repetitions."""
    draw = random.Random(5)
    whole = [draw.randrange(1, 128) for _ in range(800)]
    steps = [(whole, 2)]
    for turn, response in enumerate((2, 200, 1, 64, 400)):
        own = [draw.randrange(1, 128) for _ in range(400)]
        cuts = [730 - 60 * (2 * turn + branch) for branch in range(2)]
        branches = [whole[:cut] + own[:length] for cut, length in zip(cuts, (12, 160 - cuts[1] % 32))]
        for prompt in [own[: 224 + 32 * turn], *branches]:
            steps += [(prompt, response), (prompt, 2)]
        steps.append((branches[-1] + own[300:340], 2))
    return steps


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


def post(url: str, body: dict, headers: dict | None = None) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read() or b"{}")


def cached(answer: dict) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def ask(url: str, model: str, prompt: list[int], response: int = 2, rank: int | None = None, **members: str) -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": response, "temperature": 0, "ignore_eos": True, **members}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = post(f"{url}/v1/completions", body, headers)
    line = {"model": model, "cached": cached(answer), "prompt": prompt}
    if response != 2:
        line["response"] = answer["usage"]["completion_tokens"]
    if rank is not None:
        line["rank"] = rank
    return {**line, **members}


def flush(url: str) -> dict:
    """Empties vLLM's own cache."""
    post(f"{url}/reset_prefix_cache", {})
    # It publishes what happened with its next step, and only requests make it step.
    return ask(url, "tiny", [7])


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


def steps(url: str, kind: str, models: list[str], ranks: int) -> list[Callable[[], dict]]:
    few = [partial(ask, url, models[n % len(models)], prompt) for n, prompt in enumerate(few_prompts())]
    if kind == "--images":
        return [partial(ask_with_images, url, body) for body in image_prompts()]
    if kind == "--responses":
        return [partial(ask, url, models[0], prompt, response) for prompt, response in with_responses()]
    if kind == "--ranks":
        # Each rank computes all of them, in turns, but one of them begins later.
        turns = zip(few_prompts() + few_prompts()[:5], few_prompts()[-5:] + few_prompts())
        return [partial(ask, url, models[0], prompt, rank=n % ranks) for turn in turns for n, prompt in enumerate(turn)]
    if kind == "--flushes":
        return [*few, partial(flush, url), *few[3:10], partial(flush, url), *few[-5:]]
    if kind == "--keys":
        keys = [{}, {"extra_key": "a"}, {"cache_salt": "b"}, {"extra_key": "a", "cache_salt": "b"}]
        prompts = few_prompts()[3:7]
        return [partial(ask, url, model, prompt, **key) for model in models for prompt in prompts for key in keys]
    if kind == "--few":
        return [*few, *few]
    return [partial(ask, url, models[n % len(models)], prompt) for n, prompt in enumerate(prompts())]


def main(url: str, endpoint: str, output: str, rest: list[str]) -> None:
    kind, models = (rest[0], rest[1:]) if rest and rest[0].startswith("--") else ("", rest)
    ranks, models = (int(models[0]), []) if kind == "--ranks" else (1, models)
    address, port = endpoint.rsplit(":", 1)
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    for rank in range(ranks):
        socket.connect(f"{address}:{int(port) + rank}")
    time.sleep(QUIET_SECONDS)
    with open(output, "w") as out:
        for step in steps(url, kind, models or ["tiny"], ranks):
            print(json.dumps(step(), separators=(",", ":")), file=out)
            while socket.poll(QUIET_SECONDS * 1000):
                print(json.dumps({"events": socket.recv_multipart()[2].hex()}), file=out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
