"""Preference data sets: rows in the form of each, with content of our own and the right order.

The better image is the brighter one, so that a reward of brightness agrees with every
row. `source` is where the form was read. Not found, and so not here:
Rapidata's videos, further columns of open-image-preferences, and the tasks of
MMRB2 whose responses are not one image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BETTER, WORSE = "better.png", "worse.png"  # files that a test writes
PROMPT = "a lamp that shines"
GREETING = "\n\nHuman: Hi\n\nAssistant: Hello"
QUESTION, GOOD, BAD = "What is two and two?", "It is four.", "It is five, or six."


@dataclass(frozen=True)
class PreferenceForm:
    """A table of a data set, `suffix` its kind, and the layout that reads it. `pairs` is the number
    of pairs, in all of which the better one wins; `ties` of them are even."""

    layout: str
    suffix: str
    rows: Any
    source: str
    pairs: int = 1
    ties: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def image(name: str) -> dict[str, Any]:
    """An image as `datasets` stores it: a test replaces the name by the file's bytes."""
    return {"bytes": name, "path": name}


def said(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(turns)
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


def theirs(*turns: str) -> list[dict[str, str]]:
    """Messages in ShareGPT's form."""
    names = ("human", "gpt") * len(turns)
    return [{"from": name, "value": turn} for name, turn in zip(names, turns, strict=False)]


def written(text: str) -> list[dict[str, Any]]:
    """An answer as a message of parts, as models of images and texts have them."""
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def parts(name: str) -> dict[str, Any]:
    return {"model": "m", "response_content": [["image", name]]}


def edited(
    first: str, second: str, firsts: tuple[int, ...], seconds: tuple[int, ...], **more: bool
) -> dict[str, Any]:
    """A row of EditReward's files: two edits with their scores by dimension."""
    scores = {
        f"model{side}_dim{i}_score": score
        for side, by_dimension in ((1, firsts), (2, seconds))
        for i, score in enumerate(by_dimension, 1)
    }
    return {
        "prompt": "light the lamp",
        "choice_dist": None,
        "confidence": None,
        "path_src": WORSE,
        "path1": first,
        "path2": second,
        "model1": "m",
        "model2": "n",
        **scores,
        "model1_overall_score": sum(firsts),
        "model2_overall_score": sum(seconds),
        **more,
    }


SIDES = {"prompt": PROMPT, "left_model": "m", "right_model": "n"}

FORMS: dict[str, PreferenceForm] = {
    "hh-rlhf": PreferenceForm(
        "texts",
        "jsonl",
        [
            {
                "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: {GOOD}",
                "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: {BAD}",
            },
            {
                "chosen": f"{GREETING}\n\nHuman: {QUESTION}\n\nAssistant: {GOOD}",
                "rejected": f"{GREETING}\n\nHuman: {QUESTION}\n\nAssistant: {BAD}",
            },
        ],
        "the authors' DPO loader (eric-mitchell/direct-preference-optimization): the prompt ends "
        "at the last Assistant turn",
        pairs=2,
    ),
    "UltraFeedback, binarized": PreferenceForm(
        "texts",
        "parquet",
        [
            {
                "prompt": QUESTION,
                "prompt_id": "1",
                "chosen": said(QUESTION, GOOD),
                "rejected": said(QUESTION, BAD),
                "messages": said(QUESTION, GOOD),
                "score_chosen": 8.0,
                "score_rejected": 3.0,
            }
        ],
        "HuggingFaceH4/ultrafeedback_binarized, columns as loaders name them",
    ),
    "UltraFeedback, implicit prompt": PreferenceForm(
        "texts",
        "parquet",
        [
            {
                "chosen": said(QUESTION, GOOD),
                "rejected": said(QUESTION, BAD),
                "score_chosen": 8.0,
                "score_rejected": 3.0,
            }
        ],
        "trl-lib/ultrafeedback_binarized, as readers of its columns use it",
    ),
    "LLaMA-Factory, sharegpt": PreferenceForm(
        "texts",
        "json",
        [
            {
                "conversations": theirs("Hi", "Hello", QUESTION),
                "chosen": {"from": "gpt", "value": GOOD},
                "rejected": {"from": "gpt", "value": BAD},
            },
            {
                "conversations": theirs(QUESTION),
                "system": "Be brief.",
                "chosen": {"from": "gpt", "value": GOOD},
                "rejected": {"from": "gpt", "value": BAD},
            },
        ],
        "data/README.md of hiyouga/LLaMA-Factory at 015ff251: pairs of its sharegpt form",
        pairs=2,
    ),
    "LLaMA-Factory, alpaca": PreferenceForm(
        "texts",
        "json",
        [
            {"instruction": "Add.", "input": "two and two", "chosen": GOOD, "rejected": BAD},
            {"instruction": QUESTION, "input": "", "chosen": GOOD, "rejected": BAD},
        ],
        "the same: pairs of its alpaca form",
        pairs=2,
    ),
    "ShareGPT, two conversations": PreferenceForm(
        "texts",
        "jsonl",
        [{"chosen": theirs(QUESTION, GOOD), "rejected": theirs(QUESTION, BAD)}],
        "FastChat's messages in the form of UltraFeedback",
    ),
    "RLAIF-V": PreferenceForm(
        "texts",
        "parquet",
        [
            {
                "images": [image(BETTER)],
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "text": None},
                            {"type": "text", "text": QUESTION},
                        ],
                    }
                ],
                "chosen": written(GOOD),
                "rejected": written(BAD),
            }
        ],
        "TRL's examples/datasets/rlaif-v.py: prompt, chosen and rejected as messages of parts",
    ),
    "PKU-SafeRLHF": PreferenceForm(
        "plain_texts",
        "jsonl",
        [
            {"prompt": QUESTION, "response_0": GOOD, "response_1": BAD, "better_response_id": 0},
            {"prompt": QUESTION, "response_0": BAD, "response_1": GOOD, "better_response_id": 1},
        ],
        "the card of PKU-Alignment/PKU-SafeRLHF: better_response_id counts responses from 0",
        pairs=2,
        options={
            "columns": {
                "a_text": "response_0",
                "b_text": "response_1",
                "label": "better_response_id",
            }
        },
    ),
    "ImageRewardDB, groups": PreferenceForm(
        "imagereward_db",
        "parquet",
        [
            {
                "prompt_id": "1",
                "prompt": PROMPT,
                "classification": "things",
                "image": [image(WORSE), image(BETTER), image(BETTER)],
                "rank": [2, 1, 1],
                "overall_rating": [3, 6, 6],
                "image_text_alignment_rating": [3, 6, 6],
                "fidelity_rating": [3, 6, 6],
            }
        ],
        "ImageRewardDB.py (THUDM/ImageRewardDB), features of 8k_group",
        pairs=3,
        ties=1,
    ),
    "ImageRewardDB, rows": PreferenceForm(
        "imagereward_db",
        "parquet",
        [
            {
                "image": image(name),
                "prompt_id": "1",
                "prompt": PROMPT,
                "classification": "things",
                "image_amount_in_total": 2,
                "rank": rank,
                "overall_rating": rating,
                "image_text_alignment_rating": rating,
                "fidelity_rating": rating,
            }
            for name, rank, rating in ((WORSE, 2, 3), (BETTER, 1, 6))
        ],
        "ImageRewardDB.py, features of 8k",
    ),
    "ImageRewardDB, rows by a rating": PreferenceForm(
        "imagereward_db",
        "jsonl",
        [
            {"image": name, "prompt_id": "1", "prompt": PROMPT, "rank": 1, "overall_rating": rating}
            for name, rating in ((WORSE, 3), (BETTER, 6))
        ],
        "the same, with --dimension overall_rating",
        options={"dimension": "overall_rating"},
    ),
    "ImageRewardDB, pairs": PreferenceForm(
        "imagereward_pairs",
        "parquet",
        [
            {
                "prompt_id": "1",
                "prompt": PROMPT,
                "classification": "things",
                "img_better": image(BETTER),
                "img_worse": image(WORSE),
            }
        ],
        "ImageRewardDB.py, features of 8k_pair",
    ),
    "ImageReward, test": PreferenceForm(
        "imagereward",
        "json",
        [{"id": "1", "prompt": PROMPT, "generations": [BETTER, WORSE], "ranking": [1, 2]}],
        "THUDM/ImageReward, data/test.json",
    ),
    "RichHF-18K": PreferenceForm(
        "richhf",
        "parquet",
        [
            {
                "filename": f"{name}",
                "prompt": PROMPT,
                "image": image(name),
                "aesthetics_score": score,
                "artifact_score": score,
                "misalignment_score": score,
                "overall_score": score,
            }
            for name, score in ((WORSE, 0.25), (BETTER, 0.75))
        ],
        "two readers of Exploration/richhf_18k_with_images: all four scores are better if higher",
    ),
    "MMRB2": PreferenceForm(
        "mmrb2",
        "json",
        {
            "pairs": [
                {
                    "pair_id": "1",
                    "prompt_source": "oneigbench",
                    "prompt_content": [["text", PROMPT]],
                    "prompt_metadata": {"id": "1"},
                    "response_a": parts(BETTER),
                    "response_b": parts(WORSE),
                    "human_preference": "A",
                },
                {
                    "pair_id": "2",
                    "prompt_source": "emu_edit",
                    "prompt_content": [["image", WORSE], ["text", "light the lamp"]],
                    "prompt_metadata": {"id": "2"},
                    "response_a": parts(WORSE),
                    "response_b": parts(BETTER),
                    "human_preference": "B",
                },
            ]
        },
        "facebookresearch/MMRB2, benchmark/README.md at 1202a08b",
        pairs=2,
    ),
    "open-image-preferences, binarized": PreferenceForm(
        "chosen",
        "parquet",
        [{"prompt": PROMPT, "chosen": image(BETTER), "rejected": image(WORSE)}],
        "a reader of data-is-better-together/open-image-preferences-v1-binarized: prompt, chosen "
        "and rejected as images; its other columns are not known here",
    ),
    "Rapidata": PreferenceForm(
        "rapidata",
        "parquet",
        [
            {
                "prompt": PROMPT,
                "image1": image(WORSE),
                "image2": image(BETTER),
                "model1": "m",
                "model2": "n",
                "weighted_results_image1_preference": 0.2,
                "weighted_results_image2_preference": 0.8,
                "detailed_results_preference": "[]",
            }
        ],
        "Rapidata's own upload of its human preference sets: features of the data set",
    ),
    "GenAI-Bench, images": PreferenceForm(
        "genai",
        "parquet",
        [
            SIDES
            | {
                "left_output_image": image(BETTER),
                "right_output_image": image(WORSE),
                "vote_type": "leftvote",
            },
            SIDES
            | {
                "left_output_image": image(WORSE),
                "right_output_image": image(BETTER),
                "vote_type": "rightvote",
            },
        ],
        "TIGER-Lab/GenAI-Bench, a loader of its columns",
        pairs=2,
    ),
    "VideoGen-RewardBench": PreferenceForm(
        "videogen",
        "csv",
        [
            {
                "path_A": BETTER,
                "path_B": WORSE,
                "A_model": "m",
                "B_model": "n",
                "prompt": PROMPT,
                "VQ": "same",
                "MQ": "same",
                "TA": "A",
                "Overall": "A",
            }
        ],
        "videogen-rewardbench.csv, as VideoScore2's evaluation reads it",
    ),
    "HPDv2, test": PreferenceForm(
        "hpdv2",
        "json",
        [{"prompt": PROMPT, "image_path": [WORSE, BETTER], "rank": [1, 0]}],
        "ymhao/HPDv2, test.json",
    ),
    "HPDv2, train": PreferenceForm(
        "hpdv2_pairs",
        "json",
        [{"prompt": PROMPT, "file_path": [WORSE, BETTER], "human_preference": [0, 1]}],
        "ymhao/HPDv2, train.json",
    ),
    "HPDv2, from the hub": PreferenceForm(
        "hpdv2_hub",
        "parquet",
        [
            {
                "prompt": PROMPT,
                "image_path": "",
                "image": [image(WORSE), image(BETTER)],
                "rank": [],
                "human_preference": [0, 1],
            },
            {
                "prompt": PROMPT,
                "image_path": "",
                "image": [image(WORSE), image(BETTER)],
                "rank": [2, 1],
                "human_preference": [],
            },
        ],
        "typed readers of load_dataset('ymhao/HPDv2'): image is a list, human_preference or rank "
        "a list of numbers",
        pairs=2,
    ),
    "HPDv3": PreferenceForm(
        "hpdv3",
        "json",
        [
            {
                "prompt": PROMPT,
                "path1": BETTER,
                "path2": WORSE,
                "choice_dist": [9, 1],
                "confidence": 0.9,
                "model1": "m",
                "model2": "n",
                "source": "s",
            }
        ],
        "a training library's handler of MizzenAI/HPDv3: path1 is the preferred one",
    ),
    "Pick-a-Pic": PreferenceForm(
        "pickapic",
        "parquet",
        [
            {
                "caption": PROMPT,
                "jpg_0": image(BETTER)["bytes"],
                "jpg_1": image(WORSE)["bytes"],
                "label_0": 1.0,
                "label_1": 0.0,
                "has_label": True,
            }
        ],
        "yuvalkirstain/PickScore, its loader of pickapic_v1",
    ),
    "EditReward-Bench": PreferenceForm(
        "editreward_bench",
        "parquet",
        [
            {
                "instruction": "light the lamp",
                "source_image": image(WORSE),
                "candidate_1": image(BETTER),
                "candidate_2": image(WORSE),
                "ranking": "A>B",
            }
        ],
        "TIGER-AI-Lab/EditReward, evaluate/eval_bench.py at 84602889",
    ),
    "EditReward-Data": PreferenceForm(
        "editreward_data",
        "json",
        [
            edited(BETTER, WORSE, (4, 3), (3, 3), tie_case=False),
            edited(WORSE, WORSE, (4, 2), (4, 2), tie_case=True),
        ],
        "EditReward/TRAIN_README.md of TIGER-AI-Lab/EditReward at 5cfbcfb7: path1 is the preferred "
        "one, and tie_case says that both overall scores are equal",
        pairs=2,
        ties=1,
    ),
    "EditReward, validation": PreferenceForm(
        "editreward_data",
        "json",
        [edited(BETTER, WORSE, (4,), (2,))],
        "the same: its valid_dataset_1.json has one dimension and no tie_case",
    ),
    "own names": PreferenceForm(
        "chosen",
        "jsonl",
        [{"caption": PROMPT, "pair": {"win": BETTER, "lose": WORSE}}],
        "a table of one's own",
        options={"columns": {"prompt": "caption", "chosen": "pair.win", "rejected": "pair.lose"}},
    ),
    "own ratings": PreferenceForm(
        "ratings",
        "csv",
        [{"text": PROMPT, "file": name, "stars": n} for name, n in ((BETTER, "5"), (WORSE, "2"))],
        "a table of one's own",
        options={"columns": {"prompt": "text", "sample": "file", "rating": "stars"}},
    ),
}
