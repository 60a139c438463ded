"""Mutants of what gradient methods are made of. `run.py` runs them."""

PATHS, RUNS = "likelihoods/test_pathwise.py", "run/test_through.py"
GRADIENTS, NOISES = "rewards/test_gradients.py", "cli/test_optimise.py"
LEAPS, JUMPS = "flowrl/likelihoods/shortcuts.py", "likelihoods/test_shortcuts.py"
PATHWISE, THROUGH = "flowrl/likelihoods/pathwise.py", "flowrl/iteration/features/reward_gradient.py"

# fmt: off
ROWS = (
    ("path-step", PATHWISE, "x = (x + (to - sigma) * v)", "x = (x - (to - sigma) * v)", PATHS),
    ("path-graph", PATHWISE, "        states.append(x.detach())\n", "        states.append(x := x.detach())\n", PATHS),
    ("path-known", PATHWISE, "(path.x0 - end * self.noise) / (1 - end)", "path.x0 - end * self.noise", PATHS),
    ("path-up", PATHWISE, "(m - reach, True, self.strengths[1])", "(m + reach, True, self.strengths[1])", PATHS),
    ("path-own-noise", PATHWISE, 'noise_of(rollout, "root")', 'noise_of(rollout, "other")', PATHS),
    ("path-strength", PATHWISE, "first + m * (last - first)", "first", PATHS),
    ("path-level", "flowrl/contrib/draft_lv.py", "(1 - level) * rollout.x0 + level * noise", "rollout.x0 + level * noise", PATHS),
    ("path-project", LEAPS, "(levels[0], 0.0) if self.project else levels", "levels", PATHS),
    ("tails-first", "samplers/routes/tails.py", "return steps - self.last\n        for", "return steps - self.last - 1\n        for", PATHS),
    ("leap-alpha", LEAPS, "x = x + self.alpha * shift", "x = x + shift", JUMPS),
    ("leap-scale", LEAPS, "scale * weight * (v - v.detach())", "weight * (v - v.detach())", JUMPS),
    ("leap-target", LEAPS, "(endpoint - target).abs()", "(endpoint - self.x0).abs()", JUMPS),
    ("leap-lagrange", LEAPS, "(ends[1] - ends[0]) / scale", "(ends[1] - ends[0])", JUMPS),
    ("leap-rescale", LEAPS, "sum(map(abs, whole)) / sum(map(abs, part)) - 1", "sum(map(abs, whole)) - 1", JUMPS),
    ("leap-rest", LEAPS, "weight / length * (states[step + 1] - states[step])", "weight * (states[step + 1] - states[step])", JUMPS),
    ("leap-bridge", "samplers/routes/tails.py", "bridge = max(rng.sample(range(steps), 2))", "bridge = rng.randrange(1, steps)", JUMPS),
    ("leap-weight", "flowrl/losses/reward.py", "value * rows.weight, rows.weight", "value, rows.weight", JUMPS),
    ("loss-hinge", "flowrl/losses/reward.py", "(self.bound - score).relu()", "(score - self.bound).relu()", PATHS),
    ("through-slope", THROUGH, "(path.x0 - path.x0.detach()) * slope", "(path.x0 - path.x0.detach()) * 2 * slope", RUNS),
    ("through-masked", THROUGH, "trained = on_host(rows.mask).any(1).nonzero()[:, 0]", "trained = torch.arange(len(rows.mask))", RUNS),
    ("through-counted", PATHWISE, "per_step = 3 if anchors else 2", "per_step = 2", RUNS),
    ("through-frozen", PATHWISE, "anchors * k + (k if more and k > 1 else 0)", "anchors * k", RUNS),
    ("through-anchor", THROUGH, "evaluations[role] = likelihood.at(policy, rows, states)",
     "evaluations[role] = likelihood.at(policy, rows, [s + 1 for s in states])", RUNS),
    ("gradient-ranks", "rewards/checks/gradient_test.py", "self.ranks >= RANKS and self.gap <= LARGEST_GAP", "True", GRADIENTS),
    ("gradient-slope", "rewards/checks/gradient_test.py", "    if not error <= SLOPE:", "    if False:", GRADIENTS),
    ("pixels-clip", "rewards/perception/pixels.py", "media = media.clamp(0, 1) if self.clipped else media", "pass", GRADIENTS),
    ("noise-natural", "flowrl/cli/optimise.py", "wide - (z[0].numel() - 1) * wide / squares", "wide", NOISES),
    ("noise-best", "flowrl/cli/optimise.py", "best[better] = score.cpu()[better], z[better]", "best[better] = score.cpu()[better], noise[better]", NOISES),
    ("noise-weights", "flowrl/cli/optimise.py", "weights[n] * differentiable_scores(", "differentiable_scores(", NOISES),
    ("steer-weights", "flowrl/cli/steer.py", "scores.totals(weights)", "scores.totals(torch.ones_like(weights))", NOISES),
    ("ratio-overflow", "flowrl/losses/ratio.py", "torch.where(advantage > 0, log_ratio.clamp(max=_LARGE), log_ratio).exp()",
     "log_ratio.exp()",
     "losses/test_losses.py"),
    ("region-overflow", "flowrl/losses/divergence.py", "inside = log_ratio.masked_fill(low | high, 0.0)", "inside = log_ratio",
     "losses/test_group_losses.py"),
)
# fmt: on
