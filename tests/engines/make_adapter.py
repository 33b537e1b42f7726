"""Writes a random LoRA adapter for the tiny model of make_model.py.

    make_adapter.py OUTPUT_FOLDER [MODULE...]
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 8, 64, 2
# Heads of 64 numbers.
OUTPUTS = {"q_proj": 2 * 64, "k_proj": 64, "v_proj": 64}


def main(output: Path, modules: list[str]) -> None:
    torch.manual_seed(11)
    weights = {}
    for layer in range(LAYERS):
        for module in modules:
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            weights[f"{at}.lora_B.weight"] = torch.randn(OUTPUTS[module], RANK)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": modules,
        "bias": "none",
    }
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "adapter_model.safetensors")
    (output / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["q_proj"])
