"""Writes a tiny random Qwen3 checkpoint. The same bytes every time: the golden tokens depend on them.

    make_model.py TOKENIZER_FOLDER OUTPUT_FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, IM_END = 151643, 151645

config = Qwen3Config(
    vocab_size=151936,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    # Fifteen times the usual value: the greedy tokens then depend on every token of the prompt, and a wrong KV block shows.
    initializer_range=0.3,
    bos_token_id=END_OF_TEXT,
    eos_token_id=IM_END,
)


def main(tokenizer: Path, output: Path) -> None:
    torch.manual_seed(7)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        # Special tokens are never the likeliest, so that an answer always has the length that was asked for.
        model.lm_head.weight[END_OF_TEXT:] = 0
    model.generation_config.eos_token_id = [IM_END, END_OF_TEXT]
    model.generation_config.pad_token_id = END_OF_TEXT
    model.generation_config.do_sample = False
    output.mkdir(parents=True)
    model.save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, output / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
