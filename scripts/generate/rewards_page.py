"""Write docs/reward_settings.md from the rewards: what each scores and needs, and its settings.

    python scripts/generate/rewards_page.py

`tests/rewards/test_reward_meanings.py` fails until the page is what this writes.
"""

from pathlib import Path

from flowrl.cli.reward_text import first_sentence, reward_needs, reward_rows, scored_media
from rewards.load import Want, names
from rewards.meanings import reward_wants
from scripts.generate.recipes_page import in_a_cell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reward_settings.md"
HEAD = """# Settings of rewards

<!-- Written by scripts/generate/rewards_page.py from the code: change the docstrings. -->

What each reward scores and needs, and what its settings mean. `flowrl rewards NAME` prints the same
beside the reward's definition, `flowrl rewards` lists them all; [rewards.md](rewards.md) says which
to take. Settings stand beside the name, `{name: clip, kind: logit}`, or within `settings`. A
function of your own is described in the same way by its docstring: see
[own_rewards.md](own_rewards.md).
"""
JUDGE = "As a judge of pairs, `{name: win_rate, judge: {name: NAME, ...}}`:"


def rewards_page() -> str:
    return HEAD + "".join(map(reward_section, names()))


def reward_section(name: str) -> str:
    """A reward's heading, first sentence, media, needs and tables."""
    wants = reward_wants(name)
    needs = "; ".join(reward_needs(name, wants[0])) or "nothing else"
    text = in_a_cell(
        f"{first_sentence(name)}. Scores: {scored_media(name)}. Needs: {needs}."
    ).replace("\\|", "|")
    parts = [f"\n## {name}\n", text, ""]
    for want in wants:
        if want == "judge":
            parts += [JUDGE.replace("NAME", name), ""]
        parts += [settings_table(name, want)]
    return "\n".join(parts)


def settings_table(name: str, want: Want) -> str:
    rows = [
        f"| `{row.name}` | {row.kind} | {_code(row.default)} | {in_a_cell(row.meaning)} |\n"
        for row in reward_rows(name, want)
    ]
    if not rows:
        return "It has no settings.\n"
    return f"| setting | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(rewards_page())
