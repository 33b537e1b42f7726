"""Renders and tokenises conversations with transformers, as the engines call it.

    oracle.py MODEL_FOLDER < CASES > ANSWERS

One JSON object a line. A case has `messages` as the engine hands them to transformers, `tools`, `documents`, `kwargs` for
`apply_chat_template`, `suffix`, and `special`; or `text` and `special`. An answer has `text` and `ids`, or `error`.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from transformers import PreTrainedTokenizerFast  # noqa: E402


def answer(tokenizer, case: dict) -> dict:
    if "text" in case:
        return {"ids": tokenizer.encode(case["text"], add_special_tokens=case["special"])}
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            tools=case.get("tools"),
            documents=case.get("documents"),
            tokenize=False,
            **case["kwargs"],
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    text += case.get("suffix", "")
    return {"text": text, "ids": tokenizer.encode(text, add_special_tokens=case.get("special", False))}


def main(folder: str) -> None:
    # The class that tokenizer.json alone decides on; a model's own class may be another for another layout of files.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for line in sys.stdin:
        print(json.dumps(answer(tokenizer, json.loads(line))), flush=True)


main(sys.argv[1])
