"""The facts of a run on its page: plan, settings, environment and alarms."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from flowrl.pages.html import count, page_section, page_table
from flowrl.pages.run_folder import RunFolder, flat

MOST_LETTERS = 600  # of a setting's value


def value_text(value: Any) -> str:
    """A setting's value as YAML would have it, cut off if it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..."


def plan_part(run: RunFolder) -> str:
    """The plan of the first iteration, and those of later starts where they differ."""
    plans: dict[str, int] = {}
    for start in run.starts:
        plans.setdefault(start.plan, start.iteration)
    if not plans:
        return ""
    note = "The steps of one draw on the model's own noise levels, and what they cost."
    body = "".join(
        (f"<h3>From iteration {iteration + 1}</h3>" if len(plans) > 1 else "")
        + f'<pre class="wide" tabindex="0">{escape(plan)}</pre>'
        for plan, iteration in plans.items()
    )
    return page_section("plan", "Plan", note, body)


def settings_part(run: RunFolder) -> str:
    """Settings that differ from the defaults first, then all of them."""
    every = dict(flat(run.settings))
    whole = _settings_table(every, "All settings")
    chosen = dict(flat(run.chosen))
    note = (
        f"{count(len(chosen), 'setting')} of {len(every)} differ from the defaults, or have none."
        " <code>run.yaml</code> holds all of them."
    )
    fold = f"<details><summary>All {len(every)} settings</summary>{whole}</details>"
    shown = _settings_table(chosen, "Settings that differ from the defaults")
    return page_section("settings", "Settings", note, shown + fold)


def _settings_table(settings: Mapping[str, Any], label: str) -> str:
    rows = [
        (f"<code>{escape(name)}</code>", f'<span dir="auto">{escape(value_text(value))}</span>')
        for name, value in settings.items()
    ]
    return f'<div class="settings">{page_table(("setting", "value"), rows, label)}</div>'


def environment_part(run: RunFolder) -> str:
    """The machine and the versions, a column per start; equal neighbours are one."""
    starts = [s for i, s in enumerate(run.starts) if not i or s.facts != run.starts[i - 1].facts]
    if not starts:
        return ""
    names = dict.fromkeys(name for start in starts for name in start.facts)
    head = ["", *(_since(start.iteration, len(starts)) for start in starts)]
    rows = [
        (escape(name), *(escape(start.facts.get(name, "")) for start in starts)) for name in names
    ]
    resumed = len(run.starts) - 1
    note = "" if not resumed else f"The run was resumed {count(resumed, 'time')}."
    body = f'<div class="settings">{page_table(head, rows, "Environment")}</div>'
    return page_section("environment", "Environment", note, body)


def _since(iteration: int, starts: int) -> str:
    return "value" if starts == 1 else f"from iteration {iteration + 1}"


def alarms_part(run: RunFolder) -> str:
    """Each alarm with its iteration and the numbers that raised it."""
    raised = sum(value for _, value in run.column("alarms"))
    setting = run.settings.get("train")
    off = isinstance(setting, Mapping) and setting.get("alarms") == "off"
    if off:
        return page_section(
            "alarms", "Alarms", "", "<p>Alarms were off (<code>train.alarms</code>).</p>"
        )
    if not raised and not run.alarms:
        text = "<p class='calm'>None: no sign of collapse, reward hacking or lost scores.</p>"
        return page_section("alarms", "Alarms", "", text)
    items = "".join(_alarms(run)) or f"<li>{count(int(raised), 'alarm')}, without a text.</li>"
    note = "Signs of collapse, reward hacking or lost scores, each with the numbers behind it."
    return page_section("alarms", "Alarms", note, f'<ol class="alarms">{items}</ol>')


def _alarms(run: RunFolder) -> Iterator[str]:
    for alarm in run.alarms:
        head = f"<b>iteration {alarm.iteration}</b>"
        yield f'<li>{head}<span dir="auto">{escape(alarm.text)}</span></li>'


def differing_settings(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, with each run's value."""
    trees = [dict(flat(run.settings)) for run in runs]
    names = dict.fromkeys(name for tree in trees for name in tree)
    rows = [(n, [value_text(t[n]) if n in t else "" for t in trees]) for n in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
