"""UniGenBench's question: python scripts/authors/unigenbench.py CHECKOUT (UniGenBench at 49d0bce).

Runs in flowrl's own environment. The question of the reward `unigenbench` is compared, character by
character, with the one that the authors' function builds, in both languages and for every point.
"""

import sys
from types import ModuleType

from common import checkout

from rewards.judging.checkpoint_question import CheckpointQuestion

PROMPT = "a {cat} and 'two' dogs\n"


def main():
    folder = checkout() / "eval" / "src"
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("pandas", ModuleType("pandas"))
    import eval_common

    questions = CheckpointQuestion.read("unigenbench", str(folder / "eval_common.py"))
    for language, question in zip(("en", "zh"), questions, strict=True):
        points = list(question.definitions)
        for some in (points, points[:1], points[5:2:-1]):
            about = [f"about {{{point}}}" for point in some]
            theirs = eval_common.build_system_prompt(PROMPT, some, about, language)
            assert question.fill(PROMPT, some, about) == theirs, language
        print(language, len(points), "points: the same text")


if __name__ == "__main__":
    main()
