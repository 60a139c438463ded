"""The joint demo's prompts: everyday words for the shapes of `flowrl.demo.world`.

"a crimson disk over an azure box" shows "a red circle above a blue square". A careless writer
confuses some words, as a language model's training data may.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from flowrl.demo.world import Split, prompts_of, wanted_shapes
from flowrl.json_text import json_text
from rewards.catalogue.shapes import COLOURS, RELATIONS, SHAPES

EVERYDAY_WORDS = {
    "red": ("crimson", "scarlet", "ruby"),
    "green": ("emerald", "lime", "jade"),
    "blue": ("azure", "navy", "cobalt"),
    "yellow": ("golden", "lemon", "amber"),
    "purple": ("violet", "lilac", "plum"),
    "black": ("ebony", "inky", "sooty"),
    "circle": ("disk", "ball", "dot"),
    "square": ("box", "block", "tile"),
    "triangle": ("wedge", "pyramid", "tent"),
    "left of": ("west of",),
    "right of": ("east of",),
    "above": ("over", "atop"),
    "below": ("under", "beneath"),
    "two": ("a pair of",),
    "three": ("a trio of",),
}
FAMILIES = (tuple(COLOURS), SHAPES, RELATIONS, ("two", "three"))
CARELESS = 0.2  # of a word's meanings are another one of its family
HARD = 0.6  # of those of the last everyday word for a colour or a shape
VOCABULARY = sorted(
    {
        part
        for name, words in EVERYDAY_WORDS.items()
        for text in (name, *words)
        for part in text.split()
    }
    | {f"{shape}s" for shape in SHAPES}
    | {f"{word}s" for shape in SHAPES for word in EVERYDAY_WORDS[shape]}
    | {"a", "an", "to", "the", "="}
)


@dataclass(frozen=True)
class Everyday:
    """A prompt in everyday words, in the world's own words, and in a careless writer's words."""

    prompt: str
    shows: str
    careless: str


def everyday(shows: str, dice: Random) -> Everyday:
    """Choose everyday words for a prompt of the world, and a careless writer's mistakes."""
    wanted = wanted_shapes(shows)
    chosen: dict[str, tuple[str, str]] = {}

    def said(name: str) -> tuple[str, str]:
        if name not in chosen:
            chosen[name] = _said(name, dice)
        return chosen[name]

    things = [(said(colour), said(shape)) for colour, shape in wanted.things]
    relation = None if wanted.relation is None else said(wanted.relation)
    number = None
    if wanted.kind == "count":
        number = said({2: "two", 3: "three"}[len(wanted.things)])
    prompt, careless = (
        _sentence([(c[k], s[k]) for c, s in things], relation and relation[k],
                  number and number[k])
        for k in (0, 1)
    )  # fmt: skip
    return Everyday(prompt, shows, careless)


def _said(name: str, dice: Random) -> tuple[str, str]:
    """An everyday word for a name, and a careless writer's interpretation of it."""
    words = EVERYDAY_WORDS[name]
    word = dice.choice(words)
    family = next(family for family in FAMILIES if name in family)
    hard = len(words) > 2 and word == words[-1]
    if dice.random() < (HARD if hard else CARELESS):
        return word, dice.choice([other for other in family if other != name])
    return word, name


def _sentence(things: list[tuple[str, str]], relation: str | None, number: str | None) -> str:
    names = [f"{colour} {shape}" for colour, shape in things]
    if number is not None:
        return f"{number} {names[0]}s"
    with_article = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names]
    return with_article[0] if relation is None else f" {relation} ".join(with_article)


def rows(split: Split, per_prompt: int = 1, seed: int = 0) -> list[Everyday]:
    """Prompts of a split in a fixed random order, with `per_prompt` choices of words."""
    dice = Random(f"{split} {seed}")
    requests = [everyday(shows, dice) for shows in prompts_of(split) for _ in range(per_prompt)]
    dice.shuffle(requests)
    return requests


def write_everyday(folder: Path) -> None:
    for split in ("train", "held_out"):
        lines = [json_text({"prompt": e.prompt, "shows": e.shows}) for e in rows(split)]
        (folder / f"everyday_{split}.jsonl").write_text("\n".join(lines) + "\n")
