"""vLLM with LMCache in its process: what LMCache has in host memory, in chunks of several blocks."""

from __future__ import annotations

import json
from pathlib import Path

from addresses import HOST, MASTER_HTTP, MASTER_PORT, PREFILL_EVENTS_PORT, PREFILL_PORT
from hits import Hits, Tally, a_late_gateway, growing_chats, mixed_prompts
from pairs import HERE, SMALL_KV_BYTES, Pair, events, vllm
from prompts import completion, ids
from store_programs import store_master, store_node
from talk import Metrics

CHUNK = 256
# Host memory of an LMCache with a store: 80 chunks.
SMALL_HOST_BYTES = 80 * CHUNK << 10


def vllm_lmcache(installed: Path, _logs: Path) -> Pair:
    return _with_lmcache(installed, {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25"})


def vllm_lmcache_store(installed: Path, _logs: Path) -> Pair:
    """With host memory for less than what the checks use, and a store behind it."""
    store = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{HOST}:{MASTER_PORT}",
        "local_hostname": HOST,
        "global_segment_size": str(256 << 20),
        "local_buffer_size": str(64 << 20),
        "protocol": "tcp",
        # By default a put that takes longer than a second is given up.
        "transfer_timeout": 20,
    }
    env = {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(SMALL_HOST_BYTES / (1 << 30)),
        "LMCACHE_REMOTE_URL": f"mooncakestore://{HOST}:{MASTER_PORT}/",
        "LMCACHE_EXTRA_CONFIG": json.dumps(store),
        "MC_FORCE_TCP": "1",
    }
    pair = _with_lmcache(installed, env)
    pair.before, pair.store_node = [store_master(installed)], store_node(installed, 51064)
    pair.store_users = [pair.prefill]
    return pair


def _with_lmcache(installed: Path, more: dict[str, str]) -> Pair:
    env = {
        "PYTHONPATH": f"{HERE / 'stand_ins/lmcache'}:{installed / 'lmcache'}",
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_LOCAL_CPU": "True",
        # Scheduler and worker are two processes: by default, and without a PYTHONHASHSEED, their hashes differ.
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        "LMCACHE_ENABLE_KV_EVENTS": "True",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_INTERNAL_API_SERVER_ENABLED": "False",
        "VLLM_SERVER_DEV_MODE": "1",
        **more,
    }
    transfer = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_module_path": "lmcache_on_cpu",
    }
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, transfer, env, events(PREFILL_EVENTS_PORT), kv_bytes=SMALL_KV_BYTES),
        decode=None,
        predicted=installed / "model/tiny-qwen3",
    )


def hits_in_lmcache(hits: Hits) -> str:
    """Prompts that vLLM's own cache has lost are found in LMCache: whole chunks, from the beginning on."""
    sent = [completion(f"{length} ids", ids(8500 + length, length)) for length in (255, 256, 257, 600, 1024, 1500, 2000)]
    for prompt in sent:
        hits.ask(prompt)
    hits.flush()
    again = Tally([hits.ask(prompt)[0] for prompt in sent])
    assert all(one.l1 == 0 for one in again.seen), f"own blocks after the flush: {again.seen}"
    assert sum(one.l2 for one in again.seen) > 5000, f"nothing was predicted in LMCache: {again.seen}"
    grown = [completion(f"{length} ids and 300 more", ids(8500 + length, length) + ids(2, 300)) for length in (600, 1500)]
    hits.flush()
    tally = Tally([hits.ask(prompt)[0] for prompt in [*grown, *grown]])
    hits.flush()
    tally.seen += [hits.ask(prompt)[0] for prompt in grown]
    return f"{again.text()}; grown: {tally.text()}"


def blocks_pushed_out(hits: Hits) -> str:
    """Prompts return after others have taken their blocks in vLLM; LMCache has room for all."""
    kept = [completion(f"{length} ids kept", ids(8700 + length, length)) for length in (300, 700, 1500)]
    others = [completion("1999 other ids", ids(8800 + number, 1999)) for number in range(9)]
    tally = Tally([hits.ask(prompt)[0] for prompt in [*kept, *others, *reversed(kept), *kept]])
    assert sum(one.l2 for one in tally.seen) > 0, f"nothing was evicted: {tally.seen}"
    return tally.text()


def hits_in_the_store(hits: Hits) -> str:
    """Prompts whose chunks have left host memory are found in the store."""
    sent = [completion(f"{length} ids stored", ids(8900 + length, length)) for length in (600, 1024, 1500)]
    others = [completion("1999 other ids", ids(9000 + number, 1999)) for number in range(14)]
    first = [hits.ask(prompt)[0] for prompt in [*sent, *others]]
    hits.flush()
    before = Metrics(MASTER_HTTP).sum("master_key_count")
    room = SMALL_HOST_BYTES // (CHUNK << 10)
    later = sum(one.tokens // CHUNK for one in first[len(sent) :])
    assert later > room and before > room, f"{later} chunks came later, the store has {before:g}: too few for {room} in host memory"
    again = Tally([hits.ask(prompt)[0] for prompt in sent])
    # The last token is always computed.
    assert all(one.found >= min(one.tokens // CHUNK * CHUNK, one.tokens - 1) > 0 for one in again.seen), f"not found: {again.seen}"
    return f"{before:g} objects in the store, host memory for {room}; {again.text()}"


LMCACHE_CHECKS = [mixed_prompts, growing_chats, hits_in_lmcache, blocks_pushed_out, a_late_gateway]
LMCACHE_STORE_CHECKS = [mixed_prompts, growing_chats, hits_in_the_store, a_late_gateway]
