"""SGLang engines that predictions must treat in other ways: data-parallel ranks, adapters, namespaces, hybrid models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from addresses import PREFILL_EVENTS_PORT, PREFILL_PORT
from pairs import HERE, Pair, events, hicache, sglang
from store_programs import store_master, store_node

ADAPTERS = ["poet", "coder"]


def _worker(installed: Path, flags: list[str], model: str = "tiny-qwen3", **more) -> Pair:
    """One engine that does both."""
    # Of options that are given twice, the last one counts.
    flags = ["--model-path", str(installed / "model" / model), *events(PREFILL_EVENTS_PORT), *flags]
    return Pair(
        engine="sglang",
        connector=None,
        prefill=sglang(installed, "worker", PREFILL_PORT, flags, **{"kv_tokens": 16384, **more}),
        decode=None,
        predicted=installed / "model" / model,
    )


def sglang_hicache(installed: Path, _logs: Path) -> Pair:
    """HiCache with a store. Without disaggregation, so that nothing needs Mooncake's transfer engine."""
    flags, env = hicache()
    # By default SGLang starts Mooncake's transfer engine, to share it with the store's client.
    pair = _worker(installed, flags, env={**env, "SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0"})
    pair.before, pair.store_node = [store_master(installed)], store_node(installed, 51063)
    pair.store_users = [pair.prefill]
    return pair


def sglang_dp(installed: Path, _logs: Path) -> Pair:
    """One engine with two data-parallel ranks, each with a cache of its own."""
    # SGLang wants a NUMA node or a list of cores per rank.
    return _worker(installed, ["--dp-size", "2"], env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})


def _lora(installed: Path, logs: Path) -> list[str]:
    python = installed / "sglang/bin/python"
    folders = [logs / name for name in ADAPTERS]
    for folder in folders:
        # SGLang loads the three projections of attention together.
        subprocess.run([python, HERE / "make_adapter.py", folder, "q_proj", "k_proj", "v_proj"], check=True)
    adapters = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders)]
    return ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--lora-paths", *adapters]


def sglang_lora(installed: Path, logs: Path) -> Pair:
    """Two adapters, and SGLang's own format of events, which has no extra keys."""
    return _worker(installed, _lora(installed, logs))


def sglang_dynamo(installed: Path, logs: Path) -> Pair:
    """The same with the format of events in which hashes depend on extra keys."""
    (flag, config) = events(PREFILL_EVENTS_PORT)
    config = json.dumps({**json.loads(config), "format": "dynamo"})
    return _worker(installed, [flag, config, *_lora(installed, logs)])


def sglang_swa(installed: Path, _logs: Path) -> Pair:
    """Spark 2.5, with a cache of its own for layers with a sliding window.

    SGLang's attention for CPUs reads that cache with the other one's positions, so both must have one size, and answers are wrong.
    """
    return _worker(installed, ["--swa-full-tokens-ratio", "1.0"], "../model-sliding/tiny-spark")


def sglang_recurrent(installed: Path, _logs: Path) -> Pair:
    """LFM2: most of its layers have a state instead of a cache of tokens."""
    # The default handling of states has pages of one token.
    return _worker(installed, ["--page-size", "1"], "tiny-lfm2")


SGLANG_VARIANTS = {
    "sglang-hicache": sglang_hicache,
    "sglang-dp": sglang_dp,
    "sglang-lora": sglang_lora,
    "sglang-dynamo": sglang_dynamo,
    "sglang-swa": sglang_swa,
    "sglang-recurrent": sglang_recurrent,
}
