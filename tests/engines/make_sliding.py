"""Writes a tiny random Spark 2.5 checkpoint, of whose layers SGLang keeps those with a sliding window in a cache of their own.

    make_sliding.py TOKENIZER_FOLDER OUTPUT_FOLDER

Hugging Face transformers has no such model, so the names of the weights are SGLang's. It disables that cache for Gemma 2 and 3.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, HEAD, VOCABULARY = 64, 128, 2, 64, 151936
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
END_OF_TEXT, IM_END = 151643, 151645
CONFIG = {
    "architectures": ["Spark2_5ForCausalLM"],
    "model_type": "spark2_5",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "num_hidden_layers": len(LAYERS),
    "head_dim": HEAD,
    "sliding_window": 128,
    "layer_types": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(len(LAYERS)):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_k_v_proj.weight": ((HEADS + 2) * HEAD, HIDDEN),
            f"{at}.self_attn.g_proj.weight": (HEADS, HIDDEN),
            f"{at}.self_attn.out_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return found


def main(tokenizer: Path, output: Path) -> None:
    torch.manual_seed(7)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.3 * torch.randn(shape) for name, shape in shapes().items()
    }
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(CONFIG, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, output / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
