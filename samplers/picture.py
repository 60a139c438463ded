"""Show plans: as a table in the terminal, as a drawing on a page."""

from collections.abc import Sequence
from itertools import groupby

from samplers.completions import TextPlan
from samplers.plan import Plan, evaluations

INK, NOISE, TRAINED, PALE = "#444", "#d9822b", "#1f77b4", "#bbb"
WIDE, HIGH, LEFT, TOP = 56.0, 15.0, 60.0, 46.0


def describe_plan(plans: Sequence[Plan]) -> str:
    """Describe the samples and cost of one draw as text: a line per step, with equal plans
    merged."""
    samples = sum(p.group for p in plans)
    trained = sum(n for p in plans for n, s in zip(p.nodes, p.steps, strict=True) if s.train)
    predicted = sum(p.predicted for p in plans)
    way = f" {predicted} intermediate," if predicted else ""
    rows = _count(trained, "trained row") if trained else "no trained steps"
    lines = [
        f"a draw: {_count(len(plans), 'plan')}, {_count(evaluations(plans), 'network evaluation')},"
        f" {_count(samples, 'decoded sample')},{way} {rows}"
    ]
    for first, last, plan in _runs(plans):
        name = f"plan {first}" if first == last else f"plans {first} to {last}"
        lines += ["", f"{name}: {_head(plan)}"]
        if first != last:
            noisy = "; ".join(_noisy(other) for other in plans[first + 1 : last + 1])
            lines.append(f"(plan {first} is shown; the noisy steps of the others are {noisy})")
        lines += _table(plan)
    return "\n".join(lines)


def describe_text_plan(plans: Sequence[TextPlan]) -> str:
    """Describe the samples and cost of one draw, as text."""
    lines: list[str] = []
    for plan in plans:
        top_k = f", top-k {plan.top_k}" if plan.top_k else ""
        min_p = f", min-p {plan.min_p:g}" if plan.min_p else ""
        lines.append(
            f"a draw: {plan.group} completions of at most {plan.length} tokens, temperature "
            f"{plan.temperature:g}, top-p {plan.top_p:g}{top_k}{min_p}; at most {plan.tokens} "
            "tokens generated"
        )
        if (rule := plan.forking) is not None:
            lines.append(
                f"  {plan.nodes[0]} trees; each forks {rule.rounds} times at its {rule.top} tokens "
                f"of highest {rule.by}, {rule.branch} completions from each"
            )
            continue
        for k, (nodes, (a, b)) in enumerate(zip(plan.nodes, plan.segments, strict=True)):
            lines.append(f"  segment {k}: tokens {a} to {b - 1}, {nodes} nodes")
    return "\n".join(lines)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _runs(plans: Sequence[Plan]) -> list[tuple[int, int, Plan]]:
    """Neighbours with the same levels, kernel, roots and group, as (first, last, first plan)."""

    def alike(pair: tuple[int, Plan]) -> tuple[object, ...]:
        plan = pair[1]
        return plan.sigmas, plan.kernel, plan.roots, plan.group

    runs: list[tuple[int, int, Plan]] = []
    for _, run in groupby(enumerate(plans), alike):
        members = list(run)
        runs.append((members[0][0], members[-1][0], members[0][1]))
    return runs


def _noisy(plan: Plan) -> str:
    return ", ".join(str(k) for k, step in enumerate(plan.steps) if step.noisy) or "none"


def _head(plan: Plan) -> str:
    words = [_count(len(plan.steps), "step"), _count(plan.roots, "root")]
    words += ["one initial noise"] if plan.shared_noise and plan.roots > 1 else []
    words += [_count(plan.group, "leaf").replace("leafs", "leaves"), f"kernel {plan.kernel}"]
    words += [f"solver {plan.solver} from step {plan.solve_from}"] if plan.solver.memory else []
    words += [f"solver {plan.solver}"] if not plan.solver.memory else []
    words += [f"siblings share noise, split {plan.split}"] if plan.split is not None else []
    return ", ".join(words)


def _table(plan: Plan) -> list[str]:
    columns = plan.columns
    lines = ["  step   sigma    next     std  nodes  evaluations  what"]
    for k, step in enumerate(plan.steps):
        words, work = ["noisy" if step.noisy else "ode"], plan.route.work(plan, k)
        words += [f"branch {step.branch}"] if step.branch > 1 else []
        words += ["trained"] if step.train else []
        words += [work.words] if work.words else []
        std = f"{columns.std[k]:7.4f}" if step.noisy else " " * 7
        lines.append(
            f"  {k:4d}  {step.sigma:6.4f}  {step.sigma_next:6.4f} {std}"
            f"  {work.nodes:5d}"
            f"  {plan.step_evaluations(k):11d}  {', '.join(words)}"
        )
    return lines


def tree_svg(plans: Sequence[Plan]) -> str:
    """Draw the trees of one draw as an SVG, roots on the left.

    A line is an edge: pale without noise, orange with noise, blue if it is trained on. A circle is
    a branch point. States that plans or roots share are drawn in each tree.
    """
    shapes, top, right = list[str](), TOP, 0.0
    for index, plan in enumerate(plans):
        height = max(2.0, plan.group) * HIGH
        shapes.append(_text(8.0, top - 14, f"plan {index}: {_count(plan.group, 'sample')}"))
        shapes += _tree(plan, top)
        top += height + 46
        right = max(right, LEFT + WIDE * len(plan.steps) + 40)
    width, height = max(right, 420.0), top
    style = "font-family:sans-serif;font-size:11px"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
    size = f' width="{width:g}" height="{height:g}" style="{style}">'
    back = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    return "\n".join([head + size, back, *_legend(), *shapes, "</svg>"]) + "\n"


def _legend() -> list[str]:
    shapes: list[str] = []
    for i, (name, colour) in enumerate((("ode", PALE), ("noisy", NOISE), ("trained", TRAINED))):
        shapes.append(_line((8.0 + 90 * i, 12.0), (32.0 + 90 * i, 12.0), colour))
        shapes.append(_text(38.0 + 90 * i, 16.0, name))
    return [
        *shapes,
        f'<circle cx="284" cy="12" r="3.5" fill="{INK}"/>',
        _text(294.0, 16.0, "branches"),
    ]


def _tree(plan: Plan, top: float) -> list[str]:
    """Edges, branch points and leaves; a node stands in the middle of its leaves."""
    levels = (plan.roots, *plan.nodes)

    def place(level: int, node: int) -> tuple[float, float]:
        return LEFT + WIDE * level, top + HIGH * plan.group / levels[level] * (node + 0.5)

    shapes: list[str] = []
    for k, step in enumerate(plan.steps):
        colour = TRAINED if step.train else NOISE if step.noisy else PALE
        for child in range(levels[k + 1]):
            parent = child // step.branch
            shapes.append(_line(place(k, parent), place(k + 1, child), colour))
    for k, step in enumerate(plan.steps):
        shapes.append(_text(LEFT + WIDE * k - 10, top - 2, f"{step.sigma:.3f}"))
        if step.branch > 1:
            shapes += [_dot(*place(k, node), 3.5, INK) for node in range(levels[k])]
    return shapes + [_dot(*place(len(plan.steps), leaf), 2.0, INK) for leaf in range(plan.group)]


def _line(a: tuple[float, float], b: tuple[float, float], colour: str) -> str:
    ends = f'x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.6"/>'


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}">{words}</text>'
