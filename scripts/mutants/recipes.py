"""Mutants of what recipes are made of. `run.py` runs them.

A row is name, file, text that occurs once in it, replacement, tests that must fail.
"""

PINS = "recipes/test_pins.py"
GRPO, TREES = "flowrl/recipes/grpo.py", "flowrl/recipes/grpo_trees.py"
PRESETS = "flowrl/recipes/text_presets.py"

# fmt: off
ROWS = (
    ("recipes-guard-h", GRPO, 'Clip(), ScaleSteps("1/h"))', "Clip())", PINS),
    ("recipes-guard-ratio", GRPO, 'Transition("ratio_norm")', "Transition()", PINS),
    ("recipes-awm-trust", "flowrl/recipes/matching.py",
     'anchors=(*anchors(kl), Anchor(1.0, "trust"))', "anchors=anchors(kl)", PINS),
    ("recipes-branch-mix", TREES, "branch, stripes=Stripes(window, every)", "branch", PINS),
    ("recipes-depth", TREES, "move=-1, stop=stop", "move=1, stop=stop", PINS),
    ("recipes-dapo-flat", PRESETS, '"text_dapo", {"drop_flat": True}', '"text_dapo", {}', PINS),
    ("recipes-luspo", PRESETS, '"denominator": "sequences"', '"denominator": "rows"', PINS),
    ("recipes-kl-place", "flowrl/recipes/text.py", '1 if self.advantage in ("greedy", "mean_whitened") else 0',
     "0", "language/test_kl_in_reward.py"),
    ("recipes-unread", "flowrl/recipes/text.py",
     "if getattr(self, name) != getattr(TextMixture, name):", "if False:",
     "recipes/test_text_recipes.py::test_a_mixture_without_sense_is_refused"),
    ("particles-sum", "samplers/particles.py", "return 2 / (times * (times + 1))", "return 1.0",
     "samplers/test_steering.py"),
    ("own-unread", "flowrl/settings/recipe.py",
     "if is_own(getattr(self, part)) and getattr(self, setting) != fields[setting].default:", "if False:",
     "recipes/test_own_parts.py"),
    ("own-trial", "flowrl/settings/own_parts.py", "wrong = self.trial(found)", "wrong = None",
     "recipes/test_own_parts.py"),
    ("own-kernel", "flowrl/recipes/grpo_trees.py", "Fork(kernel or FlowSDE(eta), branch, roots)",
     "Fork(FlowSDE(eta), branch, roots)", "recipes/test_own_parts.py"),
    ("own-source", "flowrl/run/origin.py",
     "named += [value for value in dict(run.recipe).values() if is_own(value)]", "pass",
     "recipes/test_own_parts.py"),
    ("level-shift", "flowrl/settings/levels.py", "(1 + (self.shift - 1) * t)", "(1 + self.shift * t)",
     "models/test_own_levels.py"),
    ("level-plan", "flowrl/settings/read.py", "algorithm.plan(run.levels(algorithm.steps), 0, run.train.seed)",
     "run.levels(algorithm.steps)", "models/test_own_levels.py"),
    ("plan-levels", "flowrl/run/monitor.py", "    check_levels(session)\n    weights", "    weights",
     "recipes/test_levels.py"),
    ("api-nodes", "flowrl/api/sampling.py", "leaves // (group // nodes)", "leaves // nodes",
     "api/test_api_parts.py::test_a_tree_is_sampled_alone"),
    ("api-weights", "flowrl/api/models.py", "weight.cpu(), kept.to(weight.dtype)", "weight, weight",
     "api/test_api_parts.py::test_another_pipeline_is_saved_into_the_run"),
    ("api-environment", "flowrl/api/untouched.py", "del os.environ[name]", "pass",
     "api/test_api_runs.py::test_a_run_leaves_the_process_as_it_was"),
)
# fmt: on
