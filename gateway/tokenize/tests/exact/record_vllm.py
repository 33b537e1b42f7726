"""Records what vLLM hands to transformers for each body. Runs where vLLM is installed.

    record_vllm.py TEMPLATE < bodies.json > prepared.json
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format

CONFIG = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=False)


def prepare(body: dict, template: str) -> dict:
    request = ChatCompletionRequest.model_validate(body)
    content_format = _detect_content_format(template, default="string")
    messages, _, _ = parse_chat_messages(request.messages, CONFIG, content_format)
    kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
    documents = kwargs.pop("documents", None)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return {"messages": messages, "tools": tools, "documents": documents, "kwargs": kwargs}


def main(template: str) -> None:
    out = []
    for case in json.load(sys.stdin):
        try:
            out.append(prepare(case["body"], template))
        except Exception as error:
            out.append({"refused": type(error).__name__})
    json.dump(out, sys.stdout, ensure_ascii=False, indent=1)
    print()


main(Path(sys.argv[1]).read_text())
