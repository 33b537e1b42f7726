"""The pairs of engines under test: how each is started, and how the gateway is told of it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from addresses import (
    BOOTSTRAP_PORT,
    DECODE,
    DECODE_EVENTS_PORT,
    DECODE_PORT,
    GATEWAY_ADMIN_PORT,
    HOST,
    MASTER_HTTP_PORT,
    MASTER_PORT,
    PREFILL,
    PREFILL_EVENTS_PORT,
    PREFILL_PORT,
    SIDECAR_PORT,
)
from processes import Server
from store_programs import store_config, store_master, store_node

HERE = Path(__file__).resolve().parent.parent
CONTEXT = 8192
# An engine takes one to three minutes on two idle cores, and the cores may be busy with compilers.
READY_SECONDS = 1800


@dataclass
class Pair:
    """One mode: what is started, in which order."""

    engine: str
    # The gateway's name of vLLM's connector.
    connector: str | None
    prefill: Server
    # None: the engine named prefill does both.
    decode: Server | None
    before: list[Server] = field(default_factory=list)
    bootstrap_port: int | None = None
    # The folder of the model whose cache hits the gateway predicts; None: it predicts nothing.
    predicted: Path | None = None
    # The gateway's flags for tokens of texts; None: from the folder `predicted` and nowhere else.
    tokens: list[str] | None = None
    # Whether only the gateway's tokens are compared, with another model's tokenizer.
    tokens_only: bool = False
    # A node that gives the store memory and belongs to no engine.
    store_node: Server | None = None
    # Sidecars register both engines, which do prefill and decode alike; where the first one's LoRA adapters are listed.
    lora_file: Path | None = None
    # The gateway's file of LoRA adapters that engines load when requests need them.
    adapter_file: Path | None = None
    # Whether prefill and decode are names of two engines that do both.
    both_do_both: bool = False
    # Whether SDKs are run against the pair.
    sdks: bool = False
    # The engines that import `mooncake.store`.
    store_users: list[Server] = field(default_factory=list)
    # Whether engines also import `mooncake.engine`, to transfer from prefill to decode.
    transfer_engine: bool = False

    def gateway_flags(self, tokens: list[str] | None = None) -> list[str]:
        """`tokens` are the flags for tokens of texts. Without: those of the mode."""
        if self.lora_file is not None:
            return ["--registration", "--policy", "round_robin"]
        if self.predicted is None:
            hits = []
        else:
            local = ["--model", f"tiny={self.predicted}", "--tokenize-timeout", "0s"]
            tokens = next(flags for flags in (tokens, self.tokens, local) if flags is not None)
            hits = [*tokens, *(["--mooncake-admin", f"{HOST}:{MASTER_HTTP_PORT}"] if self.store_node else [])]
        if self.adapter_file is not None:
            hits += ["--lora-adapter-file", str(self.adapter_file)]
        if self.decode is None:
            return ["--worker", PREFILL, *hits]
        if self.both_do_both:
            return ["--worker", PREFILL, "--worker", DECODE, *hits]
        comma = f",{self.bootstrap_port}" if self.bootstrap_port else ""
        return ["--prefill", f"{PREFILL}{comma}", "--decode", DECODE, *hits]

    @property
    def engines(self) -> list[Server]:
        return [self.prefill] if self.decode is None else [self.prefill, self.decode]


# Little enough device memory for evictions: 512 blocks.
SMALL_KV_BYTES = 16 << 20


def vllm(
    installed: Path,
    name: str,
    port: int,
    transfer: dict | None,
    env: dict[str, str],
    flags: list[str] | None = None,
    kv_bytes: int = 128 << 20,
    hash_algorithm: str | None = "sha256_cbor",
    model: str = "tiny-qwen3",
    context: int = CONTEXT,
) -> Server:
    hashing = [] if hash_algorithm is None else ["--prefix-caching-hash-algo", hash_algorithm]
    venv = installed / "vllm"
    return Server(
        name=name,
        ready_url=f"http://{HOST}:{port}/health",
        ready_seconds=READY_SECONDS,
        command=[
            *(str(venv / "bin/vllm"), "serve", str(installed / "model" / model)),
            *("--served-model-name", "tiny", "--host", HOST, "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(context), "--max-num-seqs", "16"),
            *(["--block-size", "32"] if model == "tiny-qwen3" else []),
            *("--kv-cache-memory-bytes", str(kv_bytes)),
            *("--enable-prefix-caching", *hashing),
            "--enable-prompt-tokens-details",
            *(["--kv-transfer-config", json.dumps(transfer)] if transfer else []),
            *(flags or []),
        ],
        env={
            **path_of(venv),
            **OFFLINE,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": HOST,
            **env,
        },
    )


def sglang(
    installed: Path,
    name: str,
    port: int,
    flags: list[str],
    env: dict[str, str] | None = None,
    kv_tokens: int = 65536,
) -> Server:
    venv = installed / "sglang"
    return Server(
        name=name,
        ready_url=f"http://{HOST}:{port}/health",
        ready_seconds=READY_SECONDS,
        command=[
            *(str(venv / "bin/python"), "-m", "sglang.launch_server"),
            *("--model-path", str(installed / "model/tiny-qwen3"), "--served-model-name", "tiny"),
            *("--host", HOST, "--port", str(port), "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--context-length", str(CONTEXT), "--max-total-tokens", str(kv_tokens), "--max-running-requests", "16"),
            *("--page-size", "32", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
            *("--enable-cache-report", "--enable-metrics"),
            *("--disaggregation-transfer-backend", "mooncake"),
            *flags,
        ],
        env={
            **path_of(venv),
            **OFFLINE,
            "PYTHONPATH": str(HERE / "stand_ins/sglang"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": HOST,
            "OMP_NUM_THREADS": "1",
            "MC_FORCE_TCP": "1",
            "MOONCAKE_PROTOCOL": "tcp",
            **(env or {}),
        },
    )


# What did not arrive is computed; by default the request fails. The checks see it, by the count of moved tokens.
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
# vLLM refuses requests with tools without them.
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def path_of(venv: Path) -> dict[str, str]:
    return {"PATH": f"{venv / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def sglang_pd(installed: Path, _logs: Path) -> Pair:
    bootstrap = ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    prefill = ["--disaggregation-mode", "prefill", *bootstrap]
    # Requests that run out of KV are put aside in ordinary memory; the other ways need a GPU.
    decode = ["--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return Pair(
        engine="sglang",
        connector=None,
        bootstrap_port=BOOTSTRAP_PORT,
        prefill=sglang(installed, "prefill", PREFILL_PORT, prefill),
        decode=sglang(installed, "decode", DECODE_PORT, decode),
        sdks=True,
    )


def vllm_nixl(installed: Path, _logs: Path) -> Pair:
    def engine(name: str, port: int, side_channel: int, transfer: dict) -> Server:
        env = {
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        }
        return vllm(installed, name, port, {"kv_connector": "NixlConnector", **transfer}, env, TOOLS)

    return Pair(
        engine="vllm",
        connector="nixl",
        prefill=engine("prefill", PREFILL_PORT, 5600, {"kv_role": "kv_producer"}),
        decode=engine("decode", DECODE_PORT, 5601, {"kv_role": "kv_consumer", **RECOMPUTE}),
        sdks=True,
    )


def vllm_mooncake(installed: Path, _logs: Path) -> Pair:
    def engine(name: str, port: int, role: str) -> Server:
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "kv_connector_module_path": "cpu_connectors",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        env = {
            "PYTHONPATH": str(HERE / "stand_ins/vllm"),
            "MC_FORCE_TCP": "1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP_PORT),
        }
        return vllm(installed, name, port, transfer, env)

    return Pair(
        engine="vllm",
        connector="mooncake",
        bootstrap_port=BOOTSTRAP_PORT,
        prefill=engine("prefill", PREFILL_PORT, "kv_producer"),
        decode=engine("decode", DECODE_PORT, "kv_consumer"),
    )


def vllm_store(installed: Path, logs: Path) -> Pair:
    env = {"MOONCAKE_CONFIG_PATH": str(store_config(logs)), "MC_FORCE_TCP": "1"}

    def engine(name: str, port: int) -> Server:
        return vllm(installed, name, port, STORE_TRANSFER, env)

    prefill, decode = engine("prefill", PREFILL_PORT), engine("decode", DECODE_PORT)
    return Pair(
        engine="vllm",
        connector="store",
        before=[store_master(installed)],
        prefill=prefill,
        decode=decode,
        store_users=[prefill, decode],
    )


STORE_TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", **RECOMPUTE}


def events(port: int) -> list[str]:
    """Flags of both engines to publish KV events, and to repeat them."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 10}",
        "topic": "kv",
    }
    return ["--kv-events-config", json.dumps(config)]


# vLLM refuses to render what it would refuse to answer.
RENDERS = ["--enable-scale-out", *TOOLS]


def vllm_hits(installed: Path, logs: Path) -> Pair:
    env = {
        "MOONCAKE_CONFIG_PATH": str(store_config(logs)),
        "MC_FORCE_TCP": "1",
        # For /reset_prefix_cache.
        "VLLM_SERVER_DEV_MODE": "1",
    }

    def engine(name: str, port: int, events_port: int, flags: list[str] | None = None, **more) -> Server:
        return vllm(installed, name, port, STORE_TRANSFER, env, [*events(events_port), *(flags or [])], **more)

    # The prefill renders requests too, also those with tools; the decode only tokenises.
    prefill = engine("prefill", PREFILL_PORT, PREFILL_EVENTS_PORT, RENDERS, kv_bytes=SMALL_KV_BYTES)
    decode = engine("decode", DECODE_PORT, DECODE_EVENTS_PORT)
    return Pair(
        engine="vllm",
        connector="store",
        before=[store_master(installed)],
        store_node=store_node(installed, 51061),
        predicted=installed / "model/tiny-qwen3",
        prefill=prefill,
        decode=decode,
        store_users=[prefill, decode],
    )


def vllm_hits_sha256(installed: Path, logs: Path) -> Pair:
    """One engine for both, with vLLM's own default for hashes."""
    pair = vllm_hits(installed, logs)
    env = pair.prefill.env
    more = {"kv_bytes": SMALL_KV_BYTES, "hash_algorithm": None}
    pair.prefill = vllm(installed, "worker", PREFILL_PORT, STORE_TRANSFER, env, events(PREFILL_EVENTS_PORT), **more)
    pair.decode = None
    pair.store_users = [pair.prefill]
    return pair


def hicache() -> tuple[list[str], dict[str, str]]:
    """Flags and environment of an SGLang with HiCache, whose third level is the store."""
    flags = [
        *("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "mooncake"),
        *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
    ]
    env = {
        "MOONCAKE_MASTER": f"{HOST}:{MASTER_PORT}",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(256 << 20),
        "MOONCAKE_LOCAL_HOSTNAME": HOST,
    }
    return flags, env


def sglang_hits(installed: Path, logs: Path) -> Pair:
    pair = sglang_pd(installed, logs)
    store, env = hicache()
    prefill = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    flags = [*prefill, *store, *events(PREFILL_EVENTS_PORT)]
    pair.prefill = sglang(installed, "prefill", PREFILL_PORT, flags, env, kv_tokens=16384)
    pair.before = [store_master(installed)]
    pair.store_node = store_node(installed, 51062)
    pair.predicted = installed / "model/tiny-qwen3"
    pair.store_users, pair.transfer_engine = [pair.prefill], True
    return pair


def vllm_deepseek(installed: Path, _logs: Path) -> Pair:
    files = installed / "deepseek/package/models"
    worker = vllm(installed, "worker", PREFILL_PORT, None, {}, [*RENDERS, "--tokenizer", str(files)])
    return Pair(engine="vllm", connector=None, prefill=worker, decode=None, predicted=files, tokens_only=True)


def sglang_deepseek(installed: Path, _logs: Path) -> Pair:
    files = installed / "deepseek/package/models"
    worker = sglang(installed, "worker", PREFILL_PORT, ["--tokenizer-path", str(files)])
    return Pair(engine="sglang", connector=None, prefill=worker, decode=None, predicted=files, tokens_only=True)


def vllm_sidecar(installed: Path, logs: Path) -> Pair:
    lora_file = logs / "adapters"
    lora_file.write_text("")

    def sidecar(number: int, engine: str, flags: list[str]) -> Server:
        port = SIDECAR_PORT + number
        return Server(
            name=f"sidecar-{number}",
            ready_url=f"http://{HOST}:{port}/healthz",
            ready_seconds=60,
            command=[
                *(os.environ["MOONGATE_BIN"], "sidecar", "--listen", f"{HOST}:{port}", "--engine-url", engine),
                *("--gateway", f"{HOST}:{GATEWAY_ADMIN_PORT}", *flags),
            ],
        )

    def engine(name: str, port: int) -> Server:
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        return vllm(installed, name, port, None, env, ["--enable-lora", "--max-lora-rank", "8"])

    return Pair(
        engine="vllm",
        connector=None,
        before=[sidecar(0, PREFILL, ["--lora-file", str(lora_file)]), sidecar(1, DECODE, [])],
        prefill=engine("first", PREFILL_PORT),
        decode=engine("second", DECODE_PORT),
        lora_file=lora_file,
    )


PAIRS = {
    "sglang-pd": sglang_pd,
    "vllm-nixl": vllm_nixl,
    "vllm-mooncake": vllm_mooncake,
    "vllm-store": vllm_store,
    "vllm-hits": vllm_hits,
    "vllm-hits-sha256": vllm_hits_sha256,
    "sglang-hits": sglang_hits,
    "vllm-deepseek": vllm_deepseek,
    "sglang-deepseek": sglang_deepseek,
    "vllm-sidecar": vllm_sidecar,
}
