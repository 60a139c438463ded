"""CLIP-FlanT5 by the authors' code: python scripts/authors/clip_flant5.py CHECKOUT (t2v_metrics).

CHECKOUT is the package's release 1.2, unpacked, or the repository at 1bec390.

Their class with a small T5 and a small CLIP tower, saved by transformers and scored by `forward` in
float32. The vocabulary has fewer words than the T5 has rows, as Flan-T5's; it is trained here on a
few lines and read by their slow tokenizer, and written as a fast one in the published form.
"""

import json
import sys
import tempfile
from pathlib import Path

from common import PROMPTS, checkout, clip_base, drawn, fill, layout, pictures, png_files, save

SIZES = {"square": (56, 56), "wide": (90, 140), "tall": (70, 33)}
TOWER = {"side": 56, "patch": 14}
LINES = (
    "A curious user and an assistant chat. USER: Does this figure show a red ball? ASSISTANT:",
)
LINES += (
    'Please answer yes or no. "Yes", two cats {in braces} roll down the hill; helpful, polite',
)
TEXTS = (*PROMPTS[:2], "", " two  cats\n", "red ball " * 700, "a \u00fc <extra_id_3>")
RULES = "A\t20\n9\t20\nD\t20\n"  # line breaks and tabs are blanks, as Flan-T5's rules have it
ROWS = 28  # of the T5 without a word: 32128 of 32100 in Flan-T5


def images(kind):
    return pictures(len(TEXTS), *SIZES[kind], seed=SIZES[kind][0])


def drawn_as(name):
    """The name that a weight was drawn by: the embedding has several."""
    return "shared.weight" if name.endswith("embed_tokens.weight") else name


def words(folder):
    """A vocabulary of sentencepiece in the layout of T5's, slow; the fast one's file."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as layouts
    from transformers import T5Tokenizer

    folder.mkdir()
    (folder / "rules.tsv").write_text(RULES)
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(LINES * 20), model_prefix=str(folder / "spiece"), vocab_size=90,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_tsv=str(folder / "rules.tsv"),
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    slow = T5Tokenizer(str(folder / "spiece.model"), extra_ids=100)
    slow.save_pretrained(folder)
    proto = layouts.ModelProto.FromString((folder / "spiece.model").read_bytes())
    return slow, fast(proto).to_str()


def fast(proto):
    """The fast tokenizer of this vocabulary."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram

    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    extra = [f"<extra_id_{i}>" for i in reversed(range(100))]
    made = Tokenizer(Unigram([*pieces, *((name, 0.0) for name in extra)], unk_id=2))
    made.add_special_tokens(["<pad>", "</s>", "<unk>", *extra])
    made.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    blank = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), blank])
    made.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return made


def main():
    root = checkout()
    for name in ("t2v_metrics", "t2v_metrics.models", "t2v_metrics.models.vqascore_models"):
        sys.modules[name] = type(sys)(name)
        sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
    from t2v_metrics.models.vqascore_models import clip_t5_model
    from t2v_metrics.models.vqascore_models.clip_t5.model import CLIPT5Config
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = Path(tempfile.mkdtemp())
    tokenizer, written = words(folder / "words")
    base = clip_base(folder / "tower", **TOWER)
    tower = fill(CLIPVisionModel(CLIPVisionConfig.from_pretrained(base)))
    tower.save_pretrained(base)
    own = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    own |= {"vocab_size": len(tokenizer) + ROWS, "feed_forward_proj": "gated-gelu"}
    own |= {"decoder_start_token_id": 0, "tie_word_embeddings": False}
    theirs = clip_t5_model.CLIPT5ForConditionalGeneration
    model = theirs(CLIPT5Config(**own))
    model.initialize_vision_modules(clip_t5_model.ModelArguments(vision_tower=str(base)))
    fill(model).shared.weight.data.copy_(drawn("shared.weight", model.shared.weight.shape))
    model.get_vision_tower().load_model()  # the published one, which is not trained
    model.save_pretrained(folder / "model", safe_serialization=False)
    theirs.to = lambda self, **_: self  # bfloat16, and a GPU
    table = clip_t5_model.CLIP_T5_MODELS["clip-flant5-xxl"]
    table["tokenizer"]["path"], table["model"]["path"] = (
        str(folder / "words"),
        str(folder / "model"),
    )
    scorer, scores = clip_t5_model.CLIPT5Model("clip-flant5-xxl", "cpu", str(folder)), {}
    for kind in SIZES:
        scores[kind] = scorer.forward(png_files(folder, images(kind)), TEXTS).numpy()
    config = json.loads((folder / "model" / "config.json").read_text())
    config["mm_vision_tower"] = "openai/clip-vit-large-patch14-336"
    saved = {n: v for n, v in model.state_dict().items() if "vision_tower" not in n}
    own = {"config": json.dumps(config), "layout": layout(saved), "words": written}
    save("clip_flant5", tower=layout(tower.state_dict()), **own, **scores)


if __name__ == "__main__":
    main()
