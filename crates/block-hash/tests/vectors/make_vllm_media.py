"""Writes vllm_media_vectors.json: hashes of blocks with images, by vLLM's own functions. Run with vLLM 0.32's Python:

    make_vllm_media.py > vllm_media_vectors.json
"""

import json
import os
from dataclasses import dataclass, field

os.environ.pop("PYTHONHASHSEED", None)

from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.utils.hashing import sha256, sha256_cbor  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402

A, B, C = "a1" * 32, "b2" * 32, "the client's own name, Straße " + "x" * 250
CASES = {
    "one image over several blocks": {"blocks": 6, "media": [(A, 5, 60)]},
    "two images in one block": {"blocks": 3, "media": [(A, 17, 4), (B, 22, 3)]},
    "one image twice in one block": {"blocks": 3, "media": [(A, 2, 4), (A, 8, 20)]},
    "four images, three of them in one block": {"blocks": 4, "media": [(A, 2, 2), (B, 5, 3), (C, 9, 9), (B, 40, 10)]},
    "with a salt": {"blocks": 3, "media": [(A, 0, 16), (B, 16, 16)], "salt": "tenant-ß"},
    "with an adapter": {"blocks": 3, "media": [(A, 3, 2), (B, 6, 30)], "lora": ("poet", "/adapters/poet")},
    "with both": {"blocks": 3, "media": [(A, 3, 2), (B, 6, 30)], "salt": "s", "lora": ("poet", "/adapters/poet")},
    "far from the start of the image": {"blocks": 30, "media": [(A, 1, 470)]},
}
BLOCK_TOKENS = 16


@dataclass
class Request:
    """The members of vLLM's request that the functions read."""

    all_token_ids: list[int]
    mm_features: list
    lora_request: LoRARequest | None
    cache_salt: str | None
    prompt_embeds: None = None
    block_hashes: list = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def fresh(text: str) -> str:
    """Each image's hash is a string object of its own, as after the transport between vLLM's processes."""
    return text.encode().decode()


def hashes(hash_function, case: dict) -> list[str]:
    kv_cache_utils.init_none_hash(hash_function)
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=fresh(name), mm_position=PlaceholderRange(offset=offset, length=length)
        )
        for name, offset, length in case["media"]
    ]
    lora = case.get("lora")
    request = Request(
        all_token_ids=list(range(1000, 1000 + BLOCK_TOKENS * case["blocks"] + 3)),
        mm_features=features,
        lora_request=lora and LoRARequest(lora_name=lora[0], lora_int_id=1, lora_path=lora[1]),
        cache_salt=case.get("salt"),
    )
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, hash_function)
    return [bytes(block).hex() for block in hasher(request)]


def main() -> None:
    found = {
        name: {**case, "sha256": hashes(sha256, case), "sha256_cbor": hashes(sha256_cbor, case)}
        for name, case in CASES.items()
    }
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
