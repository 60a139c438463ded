"""CLIP-FlanT5 on tiny random weights in the published layout, against raw calls and sums."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from rewards import load
from rewards.perception.embedding import OPENAI_MEAN, OPENAI_STD
from tests.support.reward_contract import check_contract, images, mixed_images
from tests.support.tiny_rewards import bytes_of, pixels, samples

SIDE = 16
WORDS = ["<pad>", "</s>", "<unk>", "Yes", "USER", "ASSISTANT", "show", "red", "ball", "a", "?", '"']
PROMPTS = ["a red ball", 'a {ball} "show"', "red red red ball a", ""]
CPU = {"device": "cpu", "dtype": "float32"}
CLOSE = {"rtol": 0, "atol": 2e-5}


def words() -> PreTrainedTokenizerFast:
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=known, **names)


@pytest.fixture(scope="module")
def parts():
    """(the tower, the projector, the language model), with weights that matter."""
    torch.manual_seed(3)
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
    tower = CLIPVisionModel(CLIPVisionConfig(**vision)).eval()
    projector = nn.Sequential(nn.Linear(24, 20), nn.GELU(), nn.Linear(20, 16))
    config = {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    config |= {"num_heads": 2, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    config |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    language = T5ForConditionalGeneration(T5Config(**config)).eval()
    with torch.no_grad():
        for part in (tower, projector, language):
            for weight in part.parameters():
                weight.add_(0.15 * torch.randn_like(weight))
        for stack in (language.encoder, language.decoder):
            stack.embed_tokens.weight.copy_(language.shared.weight)
    return tower, projector, language


@pytest.fixture(scope="module")
def folders(parts, tmp_path_factory) -> dict[str, str]:
    """As published: two parts with an index, the alias of the authors' class, and a tower."""
    tower, projector, language = parts
    folder = tmp_path_factory.mktemp("clip_flant5")
    state = {f"mm_projector.{name}": value for name, value in projector.state_dict().items()}
    own = language.state_dict()
    state |= {n: v for n, v in own.items() if not n.endswith("embed_tokens.weight")}
    state |= {"embed_tokens.weight": own["shared.weight"]}
    state |= {f"vision_tower.vision_tower.{n}": v for n, v in tower.state_dict().items()}
    names = sorted(state)
    files = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    where = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        torch.save({n: state[n].clone() for n in names if where[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    config = language.config.to_dict() | {"model_type": "clip_t5", "mm_hidden_size": 24}
    config |= {"mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2}
    config |= {"mm_vision_select_feature": "patch", "mm_vision_tower": "openai/clip"}
    (folder / "config.json").write_text(json.dumps(config))
    seen = folder / "tower"
    tower.save_pretrained(seen)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessor(**size).save_pretrained(seen)
    words().save_pretrained(folder / "words")
    return {"model": str(folder), "tower": str(seen), "tokenizer": str(folder / "words")}


def prepared(image: Tensor) -> Tensor:
    """Padded with the mean colour, resized and normalised by hand."""
    array = np.asarray(bytes_of(image))
    h, w = array.shape[:2]
    side = max(h, w)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = [int(255 * m) for m in OPENAI_MEAN]
    top, left = (side - h) // 2, (side - w) // 2
    square[top : top + h, left : left + w] = array
    small = Image.fromarray(square).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 255
    return (x - torch.tensor(OPENAI_MEAN).view(3, 1, 1)) / torch.tensor(OPENAI_STD).view(3, 1, 1)


@torch.no_grad()
def by_hand(parts, image: Tensor, prompt: str) -> float:
    tower, projector, language = parts
    network = getattr(tower, "vision_model", tower)  # transformers 4 has a level more
    x = network.pre_layrnorm(network.embeddings(prepared(image)[None]))
    for layer in network.encoder.layers[:-1]:  # the second last layer's states
        out = layer(x, attention_mask=None)
        x = out[0] if isinstance(out, tuple) else out
    patches = projector(x[:, 1:])
    tokens = words()
    before = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: "
    )
    behind = f'\nDoes this figure show "{prompt}"? Please answer yes or no. ASSISTANT: '
    ids = [torch.tensor([tokens(text)["input_ids"]]) for text in (before, behind)]
    assert ids[0][0, -1] == 1, "an end token stands before the image"
    vectors = [language.shared(each) for each in ids]
    inputs = torch.cat([vectors[0], patches, vectors[1]], 1)
    seen = language.encoder(inputs_embeds=inputs).last_hidden_state
    start = torch.tensor([[0, WORDS.index("Yes")]])
    said = language.decoder(input_ids=start, encoder_hidden_states=seen).last_hidden_state
    chance = (said @ language.lm_head.weight.T).softmax(-1)[0]
    return float((chance[0, WORDS.index("Yes")] * chance[1, 1]).sqrt())


@pytest.mark.parametrize("shape", [(20, 27), (27, 20), (16, 16)])
def test_the_score_is_the_geometric_mean_of_yes_and_the_end(parts, folders, shape):
    media = pixels(len(PROMPTS), *shape)
    wanted = torch.tensor(
        [by_hand(parts, image, p) for image, p in zip(media, PROMPTS, strict=True)]
    )
    assert wanted.std() > 1e-3
    reward = load("clip_flant5", **folders, **CPU)
    torch.testing.assert_close(reward(samples(media, PROMPTS)), wanted, **CLOSE)
    alone = load("clip_flant5", batch=1, **folders, **CPU)(samples(media, PROMPTS))
    torch.testing.assert_close(alone, wanted, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [images, mixed_images])
def test_the_contract_holds(folders, factory):
    check_contract(load("clip_flant5", **folders, **CPU), factory, tolerance=1e-5)


def test_other_files_are_refused(folders, tmp_path: Path):
    whole = Path(folders["model"])
    config = json.loads((whole / "config.json").read_text())
    rest = {name: folders[name] for name in ("tower", "tokenizer")} | CPU

    def refused(match: str, state: dict[str, Tensor] | None = None, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        if state is not None:
            save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=match):
            load("clip_flant5", model=str(tmp_path), **rest)

    refused("has neither model.safetensors nor pytorch_model.bin")
    refused("expected mm_projector.0 and .2, found none", {"shared.weight": torch.zeros(2, 2)})
    layers = {
        f"mm_projector.{i}.{n}": torch.zeros(2, *[2] * (n == "weight"))
        for i in (0, 2)
        for n in ("weight", "bias")
    }
    refused("has the model type 't5', not clip_t5", layers, model_type="t5")
    refused("only .* is supported", layers, mm_projector_type="linear")
    refused("has weights of another model", layers)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "gone.bin"}}')
    refused(r"lacks gone\.bin, which pytorch_model\.bin\.index\.json names")
    with pytest.raises(ValueError, match="question must contain"):
        load("clip_flant5", question="Is it good?", **folders, **CPU)
