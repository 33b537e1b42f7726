"""The SDKs of agents against a pair, with the scripts that the gateway's own tests run against simulated engines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from addresses import DECODE, GATEWAY, HOST, PREFILL
from apis import BLOCK, MODEL
from checks import Context
from direct import StandIn
from pairs import HERE
from processes import Processes, Running
from talk import Metrics, post

SCRIPTS = HERE.parent / "gateway/sdk"
# Time limit of one script. Most of it is the import of the SDKs.
SECONDS = 600
# A response that the gateway stores can be retrieved and continued through a pair.
STORE = ["--response-store", "1048576"]
STAND_IN_PORT = 30040


def sdks(context: Context, processes: Processes, gateway: Running) -> str:
    """What they get through the pair is what they get from the engines without the gateway."""
    base = gateway.server.ready_url.removesuffix("/ready")
    if context.pair.engine == "sglang":
        # None of its engines answers alone.
        with StandIn(context.pair, STAND_IN_PORT):
            names = _run_scripts(base, f"http://{HOST}:{STAND_IN_PORT}")
    else:
        names = _run_scripts(base, DECODE)
    processes.stop(gateway)
    return ", ".join(names)


def _run_scripts(base: str, reference: str) -> list[str]:
    folder = Path(os.environ["MOONGATE_SDK_DIR"])
    python = [folder / "venv/bin/python", SCRIPTS / "agent_sdks.py", base, MODEL, reference]
    node = ["node", SCRIPTS / "agent_sdks.mjs", folder, base, MODEL, reference]
    return [name for command in (python, node) for name in _run(command)]


def _run(command: list[Any]) -> list[str]:
    """Runs a script; the names of its checks."""
    own = {"NO_PROXY": "*", "no_proxy": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=SECONDS)
    names = [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert done.returncode == 0, f"after {names}: {done.stderr[-3000:]}"
    assert names, f"{command[1]} checked nothing"
    return names


def _cached_tokens(engine: str) -> float:
    """Tokens of prompts that the prefill has found in its cache."""
    return Metrics(PREFILL).sum("vllm:prefix_cache_hits_total" if engine == "vllm" else "sglang:cached_tokens_total")


def second_turns_are_cached(context: Context) -> str:
    """The prefill finds as much of the second turn of a response, and of a message, as of a chat's."""
    found = {}
    for path, turns, limit in (
        ("/v1/chat/completions", "messages", "max_tokens"),
        ("/v1/responses", "input", "max_output_tokens"),
        ("/v1/messages", "messages", "max_tokens"),
    ):
        # Of equal length, and with nothing in common but the beginning of the template.
        opening = f"{len(found)} " + "The garden wall has a round door. " * 40
        conversation = [{"role": "user", "content": opening}]
        body = {"model": MODEL, "temperature": 0, limit: 12}
        whole = post(GATEWAY, path, {**body, turns: conversation}).ok()
        conversation += [{"role": "assistant", "content": _text(whole)}, {"role": "user", "content": "And then?"}]
        before = _cached_tokens(context.pair.engine)
        post(GATEWAY, path, {**body, turns: conversation}).ok()
        found[path] = _cached_tokens(context.pair.engine) - before
    chat, *others = found.values()
    assert chat >= 8 * BLOCK, f"the chat is not cached: {found}"
    # SGLang's responses are two tokens shorter than their limit, which may be a block less.
    assert all(tokens >= chat - BLOCK for tokens in others), f"{found}"
    return ", ".join(f"{path}: {tokens:g} tokens" for path, tokens in found.items())


def _text(answer: dict) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    blocks = answer["content"] if "content" in answer else answer["output"][-1]["content"]
    return "".join(block.get("text", "") for block in blocks)
