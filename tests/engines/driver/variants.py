"""Engines that predictions must treat in other ways: adapters, hybrid models, two engines that share the requests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pairs import (
    DECODE_EVENTS_PORT,
    DECODE_PORT,
    HERE,
    PREFILL_EVENTS_PORT,
    PREFILL_PORT,
    Pair,
    events,
    vllm,
)
from sglang_variants import SGLANG_VARIANTS

ADAPTERS = ["poet", "coder"]


def vllm_lora(installed: Path, logs: Path) -> Pair:
    """One engine with two adapters."""
    python = installed / "vllm/bin/python"
    folders = [logs / name for name in ADAPTERS]
    for folder in folders:
        subprocess.run([python, HERE / "make_adapter.py", folder], check=True)
    adapters = [f"{name}={folder}" for name, folder in zip(ADAPTERS, folders)]
    flags = [*events(PREFILL_EVENTS_PORT), "--enable-lora", "--max-lora-rank", "8", "--lora-modules", *adapters]
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, None, {}, flags),
        decode=None,
        predicted=installed / "model/tiny-qwen3",
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


VARIANTS = {
    "vllm-lora": vllm_lora,
    "vllm-hybrid": vllm_hybrid,
    "vllm-recurrent": vllm_recurrent,
    "vllm-burst": vllm_burst,
    **SGLANG_VARIANTS,
}
