"""Writes tiny random checkpoints of hybrid models: layers with different kinds of attention.

    make_hybrid.py TOKENIZER_FOLDER OUTPUT_FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM

END_OF_TEXT, IM_END = 151643, 151645
COMMON = {
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "initializer_range": 0.3,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}
# Gemma's first layer has a sliding window, so that its first group of blocks is not the one with full attention.
GEMMA = Gemma3TextConfig(
    **COMMON,
    num_hidden_layers=3,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)
# LFM2's short convolutions have a state instead of a cache of tokens.
LFM = Lfm2Config(
    **COMMON,
    num_hidden_layers=3,
    layer_types=["conv", "full_attention", "conv"],
    # As in published checkpoints; transformers has no members of these names.
    block_dim=64,
    block_ff_dim=128,
    conv_dim=64,
    conv_dim_out=64,
)
MODELS = {"tiny-gemma3": (Gemma3ForCausalLM, GEMMA), "tiny-lfm2": (Lfm2ForCausalLM, LFM)}


def main(tokenizer: Path, output: Path) -> None:
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(7)
        model = kind(config).to(torch.float32)
        model.generation_config.eos_token_id = [IM_END, END_OF_TEXT]
        model.generation_config.pad_token_id = END_OF_TEXT
        folder = output / name
        folder.mkdir(parents=True)
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, folder / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
