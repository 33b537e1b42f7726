"""vLLM that speculates with EAGLE: it computes the last cached block of a prompt again, which the gateway learns."""

from __future__ import annotations

import json
from pathlib import Path

from addresses import GATEWAY_ADMIN, PREFILL_EVENTS_PORT, PREFILL_PORT
from apis import BLOCK
from hits import Hits, Tally, growing_chats, mixed_prompts
from pairs import SMALL_KV_BYTES, Pair, events, vllm
from prompts import completion, ids
from talk import Metrics, get

# Responses from which the gateway learns.
LEARNED_AFTER = 8


def vllm_eagle(installed: Path, logs: Path) -> Pair:
    """The draft model has one layer of the size of the target's. Weights are random: what is accepted does not matter."""
    target = json.loads((installed / "model/tiny-qwen3/config.json").read_text())
    same = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
    config = {
        **{key: target[key] for key in [*same, "max_position_embeddings", "rms_norm_eps", "hidden_act"]},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    draft = logs / "draft"
    draft.mkdir(parents=True, exist_ok=True)
    (draft / "config.json").write_text(json.dumps(config))
    speculation = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    flags = ["--speculative-config", json.dumps(speculation), "--load-format", "dummy", *events(PREFILL_EVENTS_PORT)]
    return Pair(
        engine="vllm",
        connector=None,
        prefill=vllm(installed, "worker", PREFILL_PORT, None, {}, flags, kv_bytes=SMALL_KV_BYTES),
        decode=None,
        predicted=installed / "model/tiny-qwen3",
    )


def last_block_is_learned(hits: Hits) -> str:
    """The first repeats are short by one block, and the next ones are predicted."""
    assert _drops() is False, f"before the first repeat: {_drops()}"
    sent = [completion(f"{length} ids", ids(5000 + length, length)) for length in range(100, 100 + 50 * LEARNED_AFTER, 50)]
    for prompt in sent:
        hits.ask(prompt)
    first = [hits.ask(prompt)[0] for prompt in sent]
    wrong = {one.predicted - one.found for one in first}
    assert wrong == {BLOCK}, f"the engine does not drop a block of each: {first}"
    assert _drops() is True, "not learned"
    counted = Metrics(GATEWAY_ADMIN).sum("moongate_prediction_error_tokens_total", 'cause="last_block"')
    assert counted == BLOCK * LEARNED_AFTER, f"{counted:g} tokens are counted as last blocks"
    return f"after {LEARNED_AFTER} repeats: {Tally([hits.ask(prompt)[0] for prompt in sent]).text()}"


def _drops() -> bool | None:
    (worker,) = get(GATEWAY_ADMIN, "/workers").ok()["workers"]
    return worker["ranks"][0]["drops_last_block"]


EAGLE_CHECKS = [last_block_is_learned, mixed_prompts, growing_chats]
