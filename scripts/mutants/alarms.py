"""Mutants of the alarms and of the metrics that they read. `mutants/run.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

ALARMS, TESTS = "flowrl/run/watch/alarms.py", "run/test_alarms.py"
RANGES, LEARNS = "run/test_ranges.py", "run/test_learning.py"
LEARNING = "flowrl/iteration/learning_check.py"
EVALUATE = "flowrl/run/evaluate/evaluate.py"
HISTOGRAMS, LINES = "flowrl/iteration/histograms.py", "flowrl/run/show/lines.py"
SAMPLE_PAGES = "flowrl/run/show/sample_pages.py"

# fmt: off
ROWS = (
    ("alarms-noise", ALARMS, "gain.size < -at.fall and gain.errors < -at.errors",
     "gain.size < -at.fall", TESTS),
    ("alarms-size", ALARMS, "gain.size < -at.fall and gain.errors < -at.errors",
     "gain.errors < -at.errors", TESTS),
    ("alarms-rise", ALARMS, " and self._rises()", "", TESTS),
    ("alarms-excuse", ALARMS, "if not risen & judged:", "if True:", TESTS),
    ("alarms-own-judge", ALARMS, "if judges is None or gain.name in judges}", "}", TESTS),
    ("alarms-unclear", ALARMS, "if risen and not judged:", "if False:", TESTS),
    ("alarms-just-gained", ALARMS, "[] if self._just_gained(iteration) else", "", TESTS),
    ("alarms-gained-when", ALARMS, "iteration - self.last[_ITERATION] > self.at.window", "False", TESTS),
    ("alarms-one-shift", ALARMS, "shifted: int = 2", "shifted: int = 1", TESTS),
    ("alarms-speed-noise", ALARMS, "max(pace, noise)", "pace", TESTS),
    ("alarms-speed-iterations", ALARMS, "self.at.speed * max(2, iterations)",
     "self.at.speed * 2", TESTS),
    ("alarms-speed-first", ALARMS, "max(2, iterations)", "iterations", TESTS),
    ("alarms-speed-base", ALARMS, "before, self.last = self.last, current |",
     "before, self.last = {**self.base, _ITERATION: 0.0}, current |", TESTS),
    ("alarms-speed-texts", ALARMS, "for name in LOOKS\n", "for name in STATISTICS\n", TESTS),
    ("alarms-once", ALARMS, "if sign.name not in self.raised]", "]", TESTS),
    ("alarms-reward-noise", ALARMS, "max(self.at.reward_fall * spread, self.at.errors * error)",
     "self.at.reward_fall * spread", TESTS),
    ("alarms-outage", ALARMS, "share = fmean([*shares, failed_share(metrics)])",
     "share = failed_share(metrics)", TESTS),
    ("alarms-abstained", "flowrl/iteration/credit.py",
     " - metrics.get(\"abstained_share\", 0.0)", "", TESTS),
    ("alarms-range-in-a-row", ALARMS, "self.outside.get(name, 0) + 1 if out else 0",
     "self.outside.get(name, 0) + out", RANGES),
    ("alarms-range-side", ALARMS, "not healthy.low <= value <= healthy.high",
     "value > healthy.high", RANGES),
    ("alarms-silent", ALARMS, "+ 1 if signal == 0 else 0", "+ 1 if signal < 0.1 else 0", RANGES),
    ("alarms-one-winner", ALARMS, "max(counts) >= self.at.one_winner * sum(counts)", "True", RANGES),
    ("alarms-smallest-fall", ALARMS, "math.sqrt(2 / samples)", "math.sqrt(1 / samples)", RANGES),
    ("learning-pairs", LEARNING, "return _HALF.sub(\"\", parameter)", "return parameter", LEARNS),
    ("learning-loss", LEARNING, "if facts.signal and not facts.taught:", "if False:", LEARNS),
    ("learning-model", LEARNING, "if facts.taught and not facts.reached:", "if False:", LEARNS),
    ("learning-step", LEARNING, "(still or carried)", "False", LEARNS),
    ("learning-decay", LEARNING, "(weights - decayed).abs()", "(weights - self.weights).abs()", LEARNS),
    ("guidance-auto", "flowrl/settings/sections/run.py",
     'return "none" if isinstance(self.algorithm().likelihood, Matching) else guidance.sample',
     "return guidance.sample", "models/test_guidance_rules.py"),
    ("guidance-matching", "flowrl/run/watch/guidance_check.py",
     "max(rows_per_state(described, scale, algorithm.steps)) > 1", "False", "models/test_guidance_rules.py"),
    ("guidance-ratio", "flowrl/settings/checks/guidance.py",
     "if sample not in MEASURED and train not in MEASURED:", "if False:",
     "models/test_guidance_rules.py"),
    ("ratio-random", "flowrl/iteration/ratio_check.py",
     "if repeated_floor(learner, training) > REPEATED * floor:", "if False:",
     "iteration/test_ratio_causes.py"),
    ("evaluate-unpaired", EVALUATE, "gains = column - column.new_tensor(base[name])",
     "gains = column", "run/test_evaluate.py"),
    ("evaluate-unscored", EVALUATE, "scored_values = values.double().masked_fill(~scored, torch.nan)",
     "scored_values = values.double()", "run/test_evaluate.py"),
    ("histograms-mask", HISTOGRAMS, "expand(mask.shape).cpu()[on_host(mask)]",
     "flatten().cpu()", "run/test_following.py"),
    ("histograms-bins", HISTOGRAMS, "_counted(values, ranges[name])",
     "_counted(values, (values.min(), values.max()))", "run/test_following.py"),
    ("following-on-policy", LINES, "samples_itself and run.train.optimizer_steps == 1", "samples_itself",
     "run/test_following.py"),
    ("training-samples-twice", SAMPLE_PAGES, "< done < iteration", "< done",
     "run/test_following.py"),
)
