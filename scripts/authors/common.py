"""Tiny random weights, bases and inputs that the authors' code and `rewards/` are both run on.

The scripts of this folder run in old environments; the tests run in today's. Both call this file,
which needs no more than numpy, torch and Pillow. A weight is drawn by the checksum of its name, so
an array file holds the names and shapes of a checkpoint in place of its weights.
"""

import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ARRAYS = Path(__file__).resolve().parents[2] / "tests" / "golden" / "authors"
PROMPTS = ("a red ball rolls down a hill", "two cats {in braces}", "")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL = (*SPECIAL, "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
OPENAI = {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
OPENAI["image_std"] = [0.26862954, 0.26130258, 0.27577711]

HEAD_SETTINGS = """
rm_head_type: {head}
lora_enable: false
model_name_or_path: {base}
use_special_tokens: true
reward_token: special
output_dim: 2
output_dir: {folder}
disable_flash_attn2: true
torch_dtype: float32
bf16: false
"""


def drawn(name, shape):
    """Weights by their name: about 1 for norms, small for biases, 1 / sqrt(fan-in) for others."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    value = torch.from_numpy(np.asarray(rng.standard_normal(tuple(shape)), dtype=np.float32))
    if len(shape) < 2:
        scale = name.endswith("weight") or name.endswith("gamma")
        return 0.1 * value + (1.0 if scale else 0.0)
    return value / max(1, int(np.prod(shape[1:]))) ** 0.5


def fill(model):
    """Give the float tensors of the model's state their drawn values; computed ones stay."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and not name.endswith("inv_freq"):
                value.copy_(drawn(name, value.shape))
    return model.eval()


def layout(state):
    """Names and shapes of a saved state, as JSON."""
    return json.dumps({name: list(value.shape) for name, value in state.items()})


def state_of(text, rename=lambda name: name):
    """The state that a layout stands for; `rename` gives the name that a weight was drawn by."""
    return {name: drawn(rename(name), shape) for name, shape in json.loads(str(text)).items()}


def digest(text):
    """Length of an authors' text and the first 16 digits of its SHA-256; the text stays theirs."""
    return f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def pictures(count, height, width, seed=0):
    """8-bit images [n h w 3] with large and small structure."""
    rng = np.random.RandomState(seed)
    rough = rng.randint(0, 256, (count, height // 8 + 1, width // 8 + 1, 3), dtype=np.int64)
    smooth = rough.repeat(8, 1).repeat(8, 2)[:, :height, :width]
    noise = rng.randint(-40, 41, smooth.shape, dtype=np.int64)
    return (smooth + noise).clip(0, 255).astype(np.uint8)


def png_files(folder, images):
    files = [Path(folder) / f"{i}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image).save(file)
    return [str(file) for file in files]


def checkout():
    """The folder of the authors' repository, the script's one argument; put on the import path."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: python {sys.argv[0]} CHECKOUT, a folder with the authors' repository")
    sys.path.insert(0, sys.argv[1])
    declare_torchvision_operators()
    return Path(sys.argv[1])


def declare_torchvision_operators():
    """A torchvision built for a GPU imports beside a torch for the CPU if these are declared."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declare_torchvision_operators.library = library  # it lives as long as the process


def save(name, **arrays):
    """Write an array file for the tests and print its scores."""
    ARRAYS.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(ARRAYS / f"{name}.npz", **arrays)
    print(
        name,
        {k: v.tolist() for k, v in arrays.items() if isinstance(v, np.ndarray) and v.size < 99},
    )


def qwen_base(folder, kind, system="You are a helpful assistant."):
    """Configuration, tokenizer and processor of a tiny Qwen2-VL or Qwen2.5-VL, as published ones.

    The vocabulary is that of single bytes. The chat template opens with the `system` sentence.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = _byte_names()
    ids = {token: len(names) + i for i, token in enumerate(SPECIAL)}
    template = {"chat_template": chat_template(system)}
    files = {"config.json": _qwen_config(kind, ids), "chat_template.json": template}
    files["vocab.json"] = {name: i for i, name in enumerate(names)}
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
    flags["single_word"] = False
    added = {str(i): {"content": token, **flags} for token, i in ids.items()}
    words = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, **template}
    words |= {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "model_max_length": 8192}
    words |= {"unk_token": None, "bos_token": None, "add_prefix_space": False}
    words |= {"additional_special_tokens": list(SPECIAL[1:]), "errors": "replace"}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "patch_size": 14}
    image |= {"processor_class": f"{CLASSES[kind]}Processor", "temporal_patch_size": 2}
    image |= {"min_pixels": 3136, "max_pixels": 12845056, **OPENAI}
    files |= {"tokenizer_config.json": words, "preprocessor_config.json": image}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def _qwen_config(kind, ids):
    vision = {"in_channels": 3, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 2, "depth": 2, "num_heads": 2, "spatial_patch_size": 14}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "model_type": kind}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48}
        vision |= {"fullatt_block_indexes": [1], "window_size": 112, "tokens_per_second": 2}
    config = {"architectures": [f"{CLASSES[kind]}ForConditionalGeneration"], "model_type": kind}
    config |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    config |= {"max_position_embeddings": 8192, "tie_word_embeddings": False}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config |= {"bos_token_id": ids[SPECIAL[0]], "eos_token_id": ids[SPECIAL[2]]}
    config |= {f"{part}_token_id": ids[f"<|{part}_pad|>"] for part in ("image", "video")}
    config |= {"vision_start_token_id": ids[SPECIAL[3]], "vision_end_token_id": ids[SPECIAL[4]]}
    return {**config, "torch_dtype": "float32", "vision_config": vision}


def clip_base(folder, width=32, side=224, embedding=24, patch=32):
    """Configuration, tokenizer and image processor of a tiny CLIP, as published ones."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = _byte_names()
    names += [f"{name}</w>" for name in names] + ["<|startoftext|>", "<|endoftext|>"]
    start, end = len(names) - 2, len(names) - 1
    small = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "projection_dim": embedding, "hidden_act": "gelu"}
    ends = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    text = {**small, **ends, "vocab_size": len(names), "max_position_embeddings": 77}
    vision = {**small, "image_size": side, "patch_size": patch}
    config = {"model_type": "clip", "projection_dim": embedding, "logit_scale_init_value": 2.6592}
    config |= {"text_config": text, "vision_config": vision, "architectures": ["CLIPModel"]}
    image = {"image_processor_type": "CLIPImageProcessor", "resample": 3, "do_normalize": True}
    image |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    image |= {"do_center_crop": True, "do_resize": True, "do_convert_rgb": True, **OPENAI}
    words = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    words |= {"bos_token": names[start], "eos_token": names[end], "unk_token": names[end]}
    files = {"config.json": config, "preprocessor_config.json": image}
    files |= {"tokenizer_config.json": {**words, "pad_token": names[end]}}
    files["vocab.json"] = {name: i for i, name in enumerate(names)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def bert_words(folder):
    """The tokenizer of a BERT: pieces of one character."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    pieces += [f"##{chr(i)}" for i in range(97, 123)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    words = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def base_weights(folder, model_class):
    """Weights of the base, which the authors' classes start from."""
    from transformers import AutoConfig

    model = model_class(AutoConfig.from_pretrained(folder))
    torch.save(fill(model).state_dict(), Path(folder) / "pytorch_model.bin")


def _byte_names():
    """A printable name for each byte, as byte-level vocabularies have: itself, or 256 and more."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def chat_template(system):
    block = "<|vision_start|><|%s_pad|><|vision_end|>"
    return (
        "{% for turn in messages %}"
        "{% if loop.first and turn.role != 'system' %}"
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "{% endif %}<|im_start|>{{ turn.role }}\n"
        "{% if turn.content is string %}{{ turn.content }}{% else %}"
        "{% for part in turn.content %}"
        f"{{% if part.type == 'image' %}}{block % 'image'}"
        f"{{% elif part.type == 'video' %}}{block % 'video'}"
        "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
