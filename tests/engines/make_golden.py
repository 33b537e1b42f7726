"""Computes the golden answers with the reference implementation, without any serving engine.

    make_golden.py MODEL_FOLDER GOLDEN_TOKENS.json            checks the token prompts
    make_golden.py MODEL_FOLDER GOLDEN_CHAT.json --write      fills in the answers of the conversations
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def main(folder: str, golden: Path, write: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = json.loads(golden.read_text())
    for number, case in enumerate(cases):
        if "messages" in case:
            text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False).input_ids
            answer = tokenizer.decode(greedy(model, prompt, case["max_tokens"]))
            case["prompt_tokens"], case["content"] = len(prompt), answer
        elif greedy(model, case["prompt"], len(case["out"])) != case["out"]:
            raise SystemExit(f"case {number}: the reference gives other tokens")
    if write:
        golden.write_text(json.dumps(cases, ensure_ascii=True, indent=1) + "\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--write" in sys.argv[3:])
