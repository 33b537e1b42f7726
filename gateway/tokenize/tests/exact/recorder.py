"""What the recorders of both engines have in common: bodies in, prepared prompts out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path


class ReasoningParserNeeded(Exception):
    """The prompt depends on the engine's reasoning parser."""


def record(prepare: Callable[[str, dict, str], dict]) -> None:
    """Calls `prepare` with the API, the body and the template of each case."""
    template, api = Path(sys.argv[1]).read_text(), sys.argv[2]
    out = []
    for case in json.load(sys.stdin):
        try:
            out.append(prepare(api, case["body"], template))
        except ReasoningParserNeeded:
            out.append({"configured": "reasoning parser"})
        except Exception as error:
            out.append({"refused": type(error).__name__})
    json.dump(out, sys.stdout, ensure_ascii=False, indent=1)
    print()
