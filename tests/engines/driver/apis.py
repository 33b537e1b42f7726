"""How the two engines are asked for tokens, and what their metrics are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from talk import Metrics, Stream, post

MODEL = "tiny"
BLOCK = 32


@dataclass(frozen=True)
class Vllm:
    path = "/v1/completions"

    def body(self, prompt: Any, tokens: int) -> dict:
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def ask(self, base: str, prompt: list[int], tokens: int) -> list[int]:
        return self.ask_many(base, prompt, tokens)[0]

    def ask_many(self, base: str, prompts: Any, tokens: int) -> list[list[int]]:
        answer = post(base, self.path, self.body(prompts, tokens)).ok()
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    def ask_stream(self, base: str, prompt: list[int], tokens: int) -> list[int]:
        got: list[int] = []
        with Stream(base, self.path, self.body(prompt, tokens)) as stream:
            for event in stream.events():
                for choice in event["choices"]:
                    got += choice["token_ids"] or []
        return got

    def busy(self, base: str) -> float:
        """Requests on the engine, running or waiting."""
        metrics = Metrics(base)
        return metrics.sum("vllm:num_requests_running") + metrics.sum("vllm:num_requests_waiting")

    def generated(self, base: str) -> float:
        return Metrics(base).sum("vllm:generation_tokens_total")


@dataclass(frozen=True)
class Sglang:
    path = "/generate"

    def body(self, prompt: Any, tokens: int) -> dict:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling}

    def ask(self, base: str, prompt: list[int], tokens: int) -> list[int]:
        return post(base, self.path, self.body(prompt, tokens)).ok()["output_ids"]

    def ask_many(self, base: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [one["output_ids"] for one in post(base, self.path, self.body(prompts, tokens)).ok()]

    def ask_stream(self, base: str, prompt: list[int], tokens: int) -> list[int]:
        got: list[int] = []
        with Stream(base, self.path, self.body(prompt, tokens)) as stream:
            for event in stream.events():
                # Every event repeats what came before.
                got = event["output_ids"]
        return got

    def busy(self, base: str) -> float:
        metrics = Metrics(base)
        queues = [
            "num_running_reqs",
            "num_queue_reqs",
            "num_prefill_bootstrap_queue_reqs",
            "num_prefill_inflight_queue_reqs",
            "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
        ]
        return sum(metrics.sum(f"sglang:{queue}") for queue in queues)

    def generated(self, base: str) -> float:
        return Metrics(base).sum("sglang:generation_tokens_total")


APIS = {"vllm": Vllm(), "sglang": Sglang()}
