"""Writes a tiny random Qwen2-VL checkpoint: images become as many tokens as in the published models, of which this has the image processor.

    make_vision.py TOKENIZER_FOLDER OUTPUT_FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

END_OF_TEXT, IM_END = 151643, 151645
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151652, 151653, 151655, 151656
CONFIG = Qwen2VLConfig(
    text_config={
        "vocab_size": 151936,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "initializer_range": 0.3,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 6, 6]},
    },
    vision_config={"depth": 1, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14},
    image_token_id=IMAGE_PAD,
    video_token_id=VIDEO_PAD,
    vision_start_token_id=VISION_START,
    vision_end_token_id=VISION_END,
    tie_word_embeddings=False,
)
PROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "processor_class": "Qwen2VLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 12845056, "shortest_edge": 3136},
    "temporal_patch_size": 2,
}
# The template of Qwen2-VL, with the number of an image left out, which is an option there.
TEMPLATE = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def main(tokenizer: Path, output: Path) -> None:
    torch.manual_seed(7)
    model = Qwen2VLForConditionalGeneration(CONFIG).to(torch.float32)
    model.generation_config.eos_token_id = [IM_END, END_OF_TEXT]
    model.generation_config.pad_token_id = END_OF_TEXT
    output.mkdir(parents=True)
    model.save_pretrained(output)
    shutil.copy(tokenizer / "tokenizer.json", output)
    texts = json.loads((tokenizer / "tokenizer_config.json").read_text())
    texts |= {"chat_template": TEMPLATE, "processor_class": "Qwen2VLProcessor"}
    (output / "tokenizer_config.json").write_text(json.dumps(texts, ensure_ascii=False, indent=1))
    (output / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
