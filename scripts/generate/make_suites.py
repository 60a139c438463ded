"""Write the suites that follow rules: shapes, compositional and text. The taxonomy is by hand.

python scripts/generate/make_suites.py
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.demo.world import prompts_of, wanted_shapes

FOLDER = Path("configs/suites")
A_CATEGORY = 16  # prompts

THINGS = (
    "apple", "backpack", "banana", "bench", "bicycle", "bird", "boat", "book", "bottle", "bowl",
    "bus", "cake", "car", "cat", "chair", "clock", "couch", "cow", "cup", "dog", "donut",
    "elephant", "fork", "giraffe", "horse", "kite", "laptop", "motorcycle", "orange", "pizza",
    "sheep", "spoon", "suitcase", "teddy bear", "toothbrush", "train", "umbrella", "vase", "zebra",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "purple", "pink", "black", "white", "brown")
PLACES = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {"bench": "benches", "bus": "buses", "couch": "couches", "sheep": "sheep"}
COLOURLESS = ("zebra", "orange", "giraffe", "banana", "pizza")  # or of one colour by nature

WORDS = ("OPEN", "Bakery", "SOLD", "Welcome", "Library", "Coffee", "Exit", "Taxi")
PHRASES = (
    "Mind the Gap", "Fresh Bread", "Happy Birthday", "No Parking", "Lost and Found",
    "Out of Order", "Best Grandma", "Platform Nine",
)  # fmt: skip
NUMERALS = ("42", "7:30", "1984", "Room 12", "50% off", "3.99", "Gate B7", "2026")
LINES = (
    "Please close the door behind you", "The early bird catches the worm",
    "We are back in five minutes", "Do not feed the ducks today", "Every cloud is made of water",
    "All trains are late this morning", "Take one apple and leave a note",
    "Here lies a very tired robot",
)  # fmt: skip
SIGNS = (
    'A wooden sign that says "{}"', 'A shop window with "{}" painted on the glass',
    'A chalkboard in a café that reads "{}"', 'A white T-shirt printed with "{}"',
    'A neon sign at night that spells "{}"', 'A book cover with the title "{}"',
    'A cake with "{}" written in icing', 'A street poster with the words "{}"',
)  # fmt: skip


def a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def shapes() -> list[dict[str, Any]]:
    """The demo's held-out prompts, by their kind."""
    rows = []
    for prompt in prompts_of("held_out"):
        wanted = wanted_shapes(prompt)
        count = f"count {len(wanted.things)}" if wanted.kind == "count" else "single"
        rows.append({"prompt": prompt, "category": wanted.relation or count})
    return sorted(rows, key=lambda row: row["category"])


def compositional(rng: random.Random) -> list[dict[str, Any]]:
    """Rows with GenEval's columns: tag, include, exclude. No prompt comes twice."""
    rows: dict[str, dict[str, Any]] = {}
    for tag in ("color_attr", "colors", "counting", "position", "two_object"):
        end = len(rows) + A_CATEGORY
        while len(rows) < end:
            row = one(tag, rng)
            rows.setdefault(row["prompt"], {"category": tag, "tag": tag} | row)
    return list(rows.values())


def one(tag: str, rng: random.Random) -> dict[str, Any]:
    """A random row of a task."""
    colourful = [thing for thing in THINGS if thing not in COLOURLESS]
    first, second = rng.sample(colourful if "color" in tag else THINGS, 2)
    hue, other = rng.sample(COLOURS, 2)
    match tag:
        case "counting":
            number = rng.choice(list(NUMBERS))
            many = PLURALS.get(first, f"{first}s")
            return {
                "prompt": f"a photo of {NUMBERS[number]} {many}",
                "include": [{"class": first, "count": number}],
                "exclude": [{"class": first, "count": number + 1}],
            }
        case "colors":
            prompt = f"a photo of a {hue} {first}"
            return {"prompt": prompt, "include": [{"class": first, "count": 1, "color": hue}]}
        case "color_attr":
            prompt = f"a photo of a {hue} {first} and a {other} {second}"
            include = [
                {"class": first, "count": 1, "color": hue},
                {"class": second, "count": 1, "color": other},
            ]
            return {"prompt": prompt, "include": include}
        case "position":
            place = rng.choice(PLACES)
            prompt = f"a photo of {a(first)} {place} {a(second)}"
            moved = {"class": first, "count": 1, "position": [place, 0]}
            return {"prompt": prompt, "include": [{"class": second, "count": 1}, moved]}
    prompt = f"a photo of {a(first)} and {a(second)}"
    return {"prompt": prompt, "include": [{"class": c, "count": 1} for c in (first, second)]}


def text() -> list[dict[str, Any]]:
    groups = {"word": WORDS, "phrase": PHRASES, "number": NUMERALS, "line": LINES}
    return [
        {"prompt": sign.format(written), "category": category, "text": written}
        for category, texts in groups.items()
        for sign, written in zip(SIGNS, texts, strict=True)
    ]


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{name}: {len(rows)} prompts")


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write("shapes", shapes())
    write("compositional", compositional(random.Random(0)))
    write("text", text())
