"""Engines that predictions must treat in other ways: adapters, hybrid models, two engines that share the requests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from addresses import DECODE_EVENTS_PORT, DECODE_PORT, PREFILL_EVENTS_PORT, PREFILL_PORT
from agent_checks import vllm_agents
from eagle_mode import vllm_eagle
from lmcache_mode import vllm_lmcache, vllm_lmcache_store
from pairs import HERE, RENDERS, SMALL_KV_BYTES, Pair, events, vllm
from runtime_adapters import RUNTIME_ADAPTER, adapter_file
from sglang_variants import SGLANG_VARIANTS
from vllm_ranks import vllm_dp

ADAPTERS = ["poet", "coder"]


def vllm_lora(installed: Path, logs: Path) -> Pair:
    """One engine with two adapters, and one that it loads when a request needs it."""
    python = installed / "vllm/bin/python"
    folders = [logs / name for name in [*ADAPTERS, RUNTIME_ADAPTER]]
    for folder in folders:
        subprocess.run([python, HERE / "make_adapter.py", folder], check=True)
    adapters = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders)]
    flags = [*events(PREFILL_EVENTS_PORT), "--enable-lora", "--max-lora-rank", "8", "--lora-modules", *adapters]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, None, env, flags),
        decode=None,
        predicted=installed / "model/tiny-qwen3",
        adapter_file=adapter_file(logs, folders[-1]),
    )


def _hybrid(installed: Path, model: str, kv_bytes: int, more: list[str]) -> Pair:
    flags = [*events(PREFILL_EVENTS_PORT), *more]
    worker = vllm(installed, "worker", PREFILL_PORT, None, {}, flags, kv_bytes=kv_bytes, model=model)
    return Pair(
        engine="vllm", connector=None, prefill=worker, decode=None, predicted=installed / "model" / model
    )


def vllm_hybrid(installed: Path, _logs: Path) -> Pair:
    """Gemma 3: its first layers have a sliding window."""
    return _hybrid(installed, "tiny-gemma3", 16 << 20, ["--block-size", "32"])


def vllm_recurrent(installed: Path, _logs: Path) -> Pair:
    """LFM2: most of its layers have a state instead of a cache of tokens. The engine chooses the size of blocks."""
    return _hybrid(installed, "tiny-lfm2", 16 << 20, [])


def vllm_xxhash(installed: Path, _logs: Path) -> Pair:
    """One engine whose hashes the gateway cannot compute."""
    flags = events(PREFILL_EVENTS_PORT)
    worker = vllm(
        installed, "worker", PREFILL_PORT, None, {}, flags, kv_bytes=SMALL_KV_BYTES, hash_algorithm="xxhash"
    )
    return Pair(
        engine="vllm", connector=None, prefill=worker, decode=None, predicted=installed / "model/tiny-qwen3"
    )


def vllm_burst(installed: Path, _logs: Path) -> Pair:
    """Two engines that do both."""
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "first", PREFILL_PORT, None, {}, events(PREFILL_EVENTS_PORT)),
        decode=vllm(installed, "second", DECODE_PORT, None, {}, events(DECODE_EVENTS_PORT)),
        predicted=installed / "model/tiny-qwen3",
        both_do_both=True,
    )


def vllm_image(installed: Path, _logs: Path) -> Pair:
    """Qwen2-VL, with vLLM's default hashes. The engine renders requests, so that it returns the tokens of images."""
    model = installed / "model/tiny-qwen2-vl"
    flags = [
        *events(PREFILL_EVENTS_PORT),
        *RENDERS,
        *("--block-size", "32", "--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--trust-request-mm-kwargs"),
    ]
    more = {"kv_bytes": 64 << 20, "model": model.name, "hash_algorithm": None}
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, None, {}, flags, **more),
        decode=None,
        predicted=model,
        tokens=["--model", f"tiny={model}"],
    )


VARIANTS = {
    "vllm-image": vllm_image,
    "vllm-lora": vllm_lora,
    "vllm-hybrid": vllm_hybrid,
    "vllm-recurrent": vllm_recurrent,
    "vllm-xxhash": vllm_xxhash,
    "vllm-burst": vllm_burst,
    "vllm-dp": vllm_dp,
    "vllm-lmcache": vllm_lmcache,
    "vllm-lmcache-store": vllm_lmcache_store,
    "vllm-eagle": vllm_eagle,
    "vllm-agents": vllm_agents,
    **SGLANG_VARIANTS,
}
