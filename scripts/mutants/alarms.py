"""Mutants of the alarms and of the metrics that they read. `mutants/run.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

ALARMS, TESTS = "flowrl/run/watch/alarms.py", "run/test_alarms.py"
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
    ("alarms-excuse", ALARMS, "if not risen & known:", "if True:", TESTS),
    ("alarms-own-judge", ALARMS, "if judges is None or gain.name in judges}", "}", TESTS),
    ("alarms-unclear", ALARMS, "if risen and not judged:", "if False:", TESTS),
    ("alarms-just-gained", ALARMS, "[] if self._just_gained(iteration) else", "", TESTS),
    ("alarms-gained-when", ALARMS, "iteration - self.last[_ITERATION] > self.at.window", "False", TESTS),
    ("alarms-one-shift", ALARMS, "shifted: int = 2", "shifted: int = 1", TESTS),
    ("alarms-speed-noise", ALARMS, "max(pace, noise)", "pace", TESTS),
    ("alarms-speed-iterations", ALARMS, "self.at.speed * max(2, iterations)",
     "self.at.speed * 2", TESTS),
    ("alarms-speed-first", ALARMS, "max(2, iterations)", "iterations", TESTS),
    ("alarms-speed-base", ALARMS, "before, self.last = self.last, now |",
     "before, self.last = {**self.base, _ITERATION: 0.0}, now |", TESTS),
    ("alarms-speed-texts", ALARMS, "for name in LOOKS\n", "for name in STATISTICS\n", TESTS),
    ("alarms-once", ALARMS, "if sign.name not in self.raised]", "]", TESTS),
    ("alarms-reward-noise", ALARMS, "max(self.at.reward_fall * spread, self.at.errors * error)",
     "self.at.reward_fall * spread", TESTS),
    ("alarms-outage", ALARMS, "share = fmean([*shares, _failed_share(metrics)])",
     "share = _failed_share(metrics)", TESTS),
    ("alarms-abstained", ALARMS, " - metrics.get(\"abstained_share\", 0.0)", "", TESTS),
    ("evaluate-unpaired", EVALUATE, "gains = column - column.new_tensor(base[name])",
     "gains = column", "run/test_evaluate.py"),
    ("evaluate-unscored", EVALUATE, "known = values.double().masked_fill(~scored, torch.nan)",
     "known = values.double()", "run/test_evaluate.py"),
    ("histograms-mask", HISTOGRAMS, "expand(mask.shape).cpu()[on_host(mask)]",
     "flatten().cpu()", "run/test_following.py"),
    ("histograms-bins", HISTOGRAMS, "_counted(values, ranges[name])",
     "_counted(values, (values.min(), values.max()))", "run/test_following.py"),
    ("following-on-policy", LINES, "own and run.train.optimizer_steps == 1", "own",
     "run/test_following.py"),
    ("training-samples-twice", SAMPLE_PAGES, "< done < iteration", "< done",
     "run/test_following.py"),
)
