"""Records an engine's KV events together with the prompts that caused them and the cache hits that it reported.

    record.py ENGINE_URL EVENTS_ENDPOINT OUTPUT [MODEL...]

Each line of OUTPUT is a prompt with its number of cached tokens, or the payload of an event in hexadecimal, in the order
in which they happened: a prompt's line comes before the events that it caused. `gateway/src/predict/recordings` replays
them. Needs vLLM's environment, for pyzmq.
"""

import json
import random
import sys
import time
import urllib.request

import zmq

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


def ask(url: str, model: str, prompt: list[int]) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        usage = json.load(answer)["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def main(url: str, endpoint: str, output: str, models: list[str]) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    time.sleep(QUIET_SECONDS)
    with open(output, "w") as out:
        for number, prompt in enumerate(prompts()):
            model = models[number % len(models)]
            cached = ask(url, model, prompt)
            print(json.dumps({"model": model, "cached": cached, "prompt": prompt}), file=out)
            while socket.poll(QUIET_SECONDS * 1000):
                print(json.dumps({"events": socket.recv_multipart()[2].hex()}), file=out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:] or ["tiny"])
