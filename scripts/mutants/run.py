"""Break the mathematics on purpose, one line at a time, and check that a test fails.

    python scripts/mutants/run.py                      the whole list (about ten minutes)
    python scripts/mutants/run.py --only kernels       those whose name begins with it
    python scripts/mutants/run.py --list

Each mutant replaces one piece of text in a temporary copy of the tree, so the working tree is never
touched, and runs the tests that must fail. Exit code 1 if one survives, or if its tests cannot run.
"""

import argparse
import importlib
import math
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from scripts.mutants.alarms import ROWS as ALARM_ROWS  # noqa: E402
from scripts.mutants.edges import ROWS as EDGE_ROWS  # noqa: E402
from scripts.mutants.kinds import ROWS as KIND_ROWS  # noqa: E402
from scripts.mutants.models import ROWS as MODEL_ROWS  # noqa: E402
from scripts.mutants.processes import ROWS as PROCESS_ROWS  # noqa: E402
from scripts.mutants.recipes import ROWS as RECIPE_ROWS  # noqa: E402
from scripts.mutants.rewards import ROWS as REWARD_ROWS  # noqa: E402
from scripts.mutants.sandbox import ROWS as SANDBOX_ROWS  # noqa: E402
from scripts.mutants.sound import ROWS as SOUND_ROWS  # noqa: E402
from scripts.mutants.text import ROWS as TEXT_ROWS  # noqa: E402
from scripts.mutants.through import ROWS as THROUGH_ROWS  # noqa: E402
from scripts.mutants.trust import ROWS as TRUST_ROWS  # noqa: E402
from scripts.mutants.votes import ROWS as VOTE_ROWS  # noqa: E402

PACKAGES = ("accelerate", "beartype", "diffusers", "fastapi", "hypothesis", "peft", "scipy.stats")
PACKAGES += ("transformers", "torch.distributed", "uvicorn", "xdist")
PATIENCE = 900  # seconds for the tests of one mutant


class Mutant(NamedTuple):
    name: str
    file: str
    find: str  # occurs exactly once in the file
    put: str
    tests: str  # files or test ids below tests/, by spaces


# fmt: off
MUTANTS = [Mutant(*row) for row in (
    ("kernels-drift", "samplers/kernels.py", "per_row(0.5 * g**2 * h, x)", "per_row(g**2 * h, x)",
     "samplers/test_kernels.py"),
    ("kernels-coefficients", "samplers/kernels.py", "kernel(zero, one, at, to).mean, std",
     "kernel(one, one, at, to).mean, std", "samplers/test_kernels.py"),
    ("kernels-euler", "samplers/kernels.py", "return x - per_row(sigma - sigma_next, x) * v",
     "return x + per_row(sigma - sigma_next, x) * v", "samplers/test_kernels.py"),
    ("kernels-sum", "samplers/kernels.py", "return values.flatten(1).mean(1)",
     "return values.flatten(1).sum(1)", "samplers/test_kernels.py"),
    ("kernels-log-std", "samplers/kernels.py", "z**2 - std.log() -", "z**2 -", "samplers/test_kernels.py"),
    ("kernels-cps", "samplers/kernels.py", "math.sin(0.5 * math.pi", "math.sin(math.pi",
     "samplers/test_kernels.py"),
    ("kernels-wan", "samplers/kernels.py", "float(sigmas[1])", "float(sigmas[0])",
     "samplers/test_kernels.py"),
    ("kernels-ddim", "samplers/kernels.py", "(fresh / noise).sqrt()", "fresh.sqrt()",
     "samplers/test_kernels.py"),
    ("kernels-pure-noise", "samplers/kernels.py", "torch.where(sigma > PURE_NOISE,",
     "torch.where(sigma >= 1,", "samplers/test_kernels.py"),
    ("kernels-ends", "samplers/kernels.py", "x + (1 - at) * v", "x - (1 - at) * v",
     "samplers/test_kernels.py"),
    ("noise-key", "samplers/noise.py", "repr(plain)", '"/".join(map(str, plain))', "samplers/test_roll.py"),
    ("plan-trunk", "samplers/plan.py", "(self.roots, self.shared_noise, self.solver,",
     "(self.roots, self.solver,", "samplers/test_plans.py"),
    ("plan-states", "samplers/step_tree.py", "[1 if self.shared_noise else self.roots]", "[self.roots]",
     "samplers/test_plans.py samplers/test_roll.py"),
    ("planners-chain", "samplers/planners.py", 'f"chain/{seed}/{iteration}"', 'f"chain/{seed}"',
     "samplers/test_plans.py"),
    ("planners-window", "samplers/planners.py", "limit = last_step(sigmas) - 1",
     "limit = last_step(sigmas)", "samplers/test_plans.py"),
    ("planners-flash", "samplers/planners.py", "int((last - end + 1) * self.ratio)",
     "int((last - end) * self.ratio)", "samplers/test_plans.py"),
    ("planners-stripes", "samplers/tree_steps.py", "k % self.every < self.size",
     "k % self.every <= self.size", "samplers/test_plans.py"),
    ("planners-prune", "samplers/tree_steps.py", "(min(self.steps) - (self.stop or 0))",
     "(max(self.steps) - (self.stop or 0))", "samplers/test_plans.py"),
    ("windows-hold", "samplers/windows.py", "else min(moves, len(starts) - 1)",
     "else moves % len(starts)", "samplers/test_plans.py samplers/test_golden_samplers.py"),
    ("windows-random", "samplers/windows.py", 'f"window/{seed}/{iteration}"', 'f"window/{seed}"',
     "samplers/test_plans.py"),
    ("windows-decay", "samplers/windows.py", "(1 - progress) + least * progress",
     "progress + least * (1 - progress)", "samplers/test_golden_samplers.py"),
    ("solvers-dpm", "samplers/solvers.py", "(m0 - nodes[0].x0) / r0", "(m0 - nodes[0].x0) * r0",
     "samplers/test_solvers.py"),
    ("solvers-heun", "samplers/solvers.py", "at.x - 0.5 * h * (at.v", "at.x - h * (at.v",
     "samplers/test_solvers.py"),
    ("solvers-sa-extra", "samplers/solvers.py", "h / 2 - late / h if a == 0", "0.0 if a == 0",
     "samplers/test_golden_samplers.py"),
    ("solvers-sa-noise", "samplers/solvers.py", "tau2 = self.noise**2 if", "tau2 = self.noise if",
     "samplers/test_golden_samplers.py"),
    ("walk-key", "samplers/walk.py", "(*self.key, draw, *purpose, node)",
     "(*self.key, 0, *purpose, node)", "samplers/test_roll.py"),
    ("walk-split", "samplers/walk.py", "(1 + plan.split**2) ** 0.5", "(1 + plan.split)",
     "samplers/test_roll.py"),
    ("walk-stored", "samplers/walk.py", "mean_log_prob(g, x_next, free)",
     "mean_log_prob(g, mean, free)", "samplers/test_roll.py"),
    ("steering-kept", "samplers/routes/particles.py", "torch.where(resampled, 0.0, log_weight)",
     "torch.zeros_like(log_weight)", "samplers/test_steering.py"),
    ("steering-spent", "samplers/routes/particles.py", "(ends - origin) - before.spent",
     "(ends - origin)", "samplers/test_steering.py"),
    ("steering-unscored", "samplers/routes/steering.py",
     "score = torch.where(score.isfinite(), score, -math.inf)",
     "score = torch.where(score.isfinite(), score, math.inf)", "samplers/test_steering.py"),
    ("advantages-std", "flowrl/credit/advantages.py", "masked_std(value, untrimmed, scale, self.correction)",
     "masked_std(value, untrimmed, scale, 0)", "credit/test_advantages.py credit/test_golden_credit.py"),
    ("advantages-rounding", "flowrl/credit/values.py", "(std > NONE * size)", "(std > 0)",
     "credit/test_advantages.py"),
    ("advantages-leave-one-out", "flowrl/credit/advantages.py", "* count / (count - 1).clamp(min=1)", "",
     "credit/test_advantages.py"),
    ("advantages-trim", "flowrl/credit/advantages.py", "mask & (rank >= drop)", "mask & (rank > drop)",
     "credit/test_advantages.py"),
    ("advantages-missing", "flowrl/credit/advantages.py", "mask & (credit.mask | ~needed)",
     "mask & credit.mask", "credit/test_advantages.py"),
    ("abstaining-total", "rewards/types.py", "scored.any(-1) & (scored | _given(abstained, scored)).all(-1)",
     "scored.all(-1)", "credit/test_abstaining.py"),
    ("abstaining-nothing", "rewards/types.py", "zeros = ~self.applies & self.scored.any(1, keepdim=True)",
     "zeros = ~self.applies", "credit/test_abstaining.py"),
    ("abstaining-leaves", "flowrl/credit/advantages.py", "node_values(scores.terms if sums else scores,",
     "node_values(scores,", "credit/test_abstaining.py"),
    ("abstaining-sum", "flowrl/credit/advantages.py", "needed = present & applying(credit, context)",
     "needed = present", "credit/test_abstaining.py"),
    ("abstaining-range", "flowrl/iteration/credit.py", "low = total.masked_fill(~scored, torch.inf)",
     "low = total", "credit/test_abstaining.py"),
    ("abstaining-none", "rewards/combine.py", "[value is not None for value in listed]",
     "[True for value in listed]", "credit/test_abstaining.py"),
    ("advantages-steps", "flowrl/credit/advantages.py", "weight / weight[:last].mean()",
     "weight / weight.mean()", "credit/test_advantages.py"),
    ("advantages-clean", "flowrl/credit/advantages.py", "(levels >= CLEAN).sum()", "(levels >= 0).sum()",
     "credit/test_advantages.py"),
    ("advantages-path", "flowrl/credit/values.py", "logp.masked_fill(~mask, -torch.inf).softmax",
     "logp.softmax", "credit/test_advantages.py credit/test_golden_credit.py"),
    ("advantages-rescale", "flowrl/credit/advantages.py", "self.to / self.at", "self.at / self.to",
     "credit/test_advantages.py"),
    ("likelihoods-published-kl", "flowrl/likelihoods/transition.py",
     "distance * fall / (2 * q**2)", "distance / (2 * q**2)",
     "likelihoods/test_likelihoods.py"),
    ("clock-slope", "samplers/clock.py", "return (self.at - self.to) / self.fall",
     "return self.at - self.to", "samplers/test_clock.py"),
    ("clock-drawn", "samplers/clock.py", "return self.moves & (self.to >= CLEAN)",
     "return self.moves", "samplers/test_clock.py"),
    ("clock-weights", "samplers/clock.py", "else sum(size * level for",
     "else sum(level for", "samplers/test_clock.py"),
    ("clock-fall", "samplers/clock.py", "fall = move.at - move.to",
     "fall = move.fall.expand_as(move.at)", "samplers/test_clock.py"),
    ("clock-density", "samplers/kernels.py", "free = drawn if free is None else drawn & free",
     "free = free", "samplers/test_clock.py"),
    ("clock-divergence", "flowrl/likelihoods/transition.py",
     "free = drawn if rows.free is None else drawn & rows.free", "free = rows.free",
     "samplers/test_clock.py"),
    ("likelihoods-ratio-norm", "flowrl/likelihoods/transition.py", "old.out, drawn, rows.layout) / (2 * q)",
     "old.out, drawn, rows.layout) / (2 * q**2)", "likelihoods/test_likelihoods.py"),
    ("likelihoods-cps", "flowrl/likelihoods/transition.py", "2 * q**2 * ratio", "q**2 * ratio",
     "likelihoods/test_likelihoods.py"),
    ("likelihoods-velocity-kl", "flowrl/likelihoods/transition.py", "distance / slope**2", "distance / slope",
     "likelihoods/test_likelihoods.py"),
    ("likelihoods-column", "flowrl/likelihoods/transition.py", "[:, edges.step].reshape(", "[:, 0].reshape(",
     "likelihoods/test_likelihoods.py"),
    ("losses-min", "flowrl/losses/ratio.py", "torch.minimum(ratio * advantage,",
     "torch.maximum(ratio * advantage,", "losses/test_losses.py"),
    ("losses-dual", "flowrl/losses/ratio.py", "torch.maximum(gain, dual", "torch.minimum(gain, dual",
     "losses/test_losses.py"),
    ("losses-counts", "flowrl/losses/base.py", "return (advantage > 0) & (ratio > 1 + high)",
     "return ratio > 1 + high", "losses/test_losses.py"),
    ("losses-preference", "flowrl/losses/preference.py", "(better - worse)", "(worse - better)",
     "losses/test_losses.py"),
    ("losses-nft-beta", "flowrl/losses/regression.py", "* self.advantage_max / self.beta",
     "* self.advantage_max", "losses/test_losses.py"),
    ("losses-nft-size", "flowrl/losses/regression.py", "error.detach().abs()", "error.abs()",
     "losses/test_losses.py"),
    ("losses-weighted", "flowrl/losses/regression.py", '-rows.advantage * evaluations["new"].logp',
     'rows.advantage * evaluations["new"].logp', "losses/test_losses.py"),
    ("matching-path", "flowrl/likelihoods/matching.py", "x = (1 - s) * x0 + s * noise",
     "x = s * x0 + (1 - s) * noise", "likelihoods/test_likelihoods.py"),
    ("matching-noise", "flowrl/likelihoods/matching.py", '"noise", draw)', '"noise")', "likelihoods/test_likelihoods.py"),
    ("matching-tie", "flowrl/likelihoods/matching.py", "return keep, differ & complete", "return keep, complete",
     "likelihoods/test_likelihoods.py"),
    ("matching-equal", "flowrl/likelihoods/matching.py", "trained = (paired & unequal)[:, None]",
     "trained = paired[:, None]", "likelihoods/test_likelihoods.py"),
    ("token-equal", "flowrl/likelihoods/token.py", "differ = differ & unlike_texts(pairs)", "pass",
     "language/test_language_policy.py"),
    ("given-equal", "flowrl/models/language/given_texts.py", "mask=mask & unlike_texts(rows)[:, None]",
     "mask=mask", "language/test_language_policy.py"),
    ("matching-huber", "flowrl/likelihoods/matching.py", "error_power=0.5, scale=0.5", "error_power=0.5",
     "likelihoods/test_likelihoods.py"),
    ("matching-floor", "flowrl/likelihoods/matching.py", "** p - FLOOR**p) / p", "** p) / p",
     "likelihoods/test_likelihoods.py losses/test_golden_losses.py"),
    ("matching-elbo", "flowrl/likelihoods/matching.py", "(2 * 0.49 * t)", "(2 * 0.7 * t)",
     "losses/test_golden_losses.py"),
    ("success-tracked", "flowrl/contrib/text_riskpo.py",
     "(quantiles + torch.tensor(tracked, dtype=score.dtype)) / 2",
     "(quantiles - torch.tensor(tracked, dtype=score.dtype)) / 2", "credit/test_success_credit.py"),
    ("behind-clip-zero", "flowrl/losses/base.py", "(advantage > 0) & (ratio > 1 + high)",
     "(advantage >= 0) & (ratio > 1 + high)", "run/test_lag.py"),
    ("gate-group", "flowrl/credit/proxies.py", "if any(plan.group < 2 for plan in choices.plans):",
     "if False:", "credit/test_proxies.py"),
    ("policies-roles", "flowrl/losses/averages.py",
     '_check_known(role, ["old", "ref", TEACHER, *averages], "the loss")', "pass",
     "losses/test_policies.py"),
    ("rec-temperature", "flowrl/losses/off_policy.py", "or not 0 <= self.pull < math.inf:",
     "or not 0 < self.pull < math.inf:", "losses/test_off_policy.py"),
    ("references-no-columns", "rewards/perception/references.py",
     "or [None] * len(samples.prompts)", "or [None]", "evaluation/test_edit_preferences.py"),
    ("client-log-folder", "rewards/serving/client.py",
     "path.parent.mkdir(parents=True, exist_ok=True)", "pass", "rewards/test_in_flight.py"),
    ("kernels-affine", "samplers/kernels.py", "if not is_affine(kernel) or any", "if any",
     "laws/test_laws.py"),
    ("laws-velocity-kl", "flowrl/losses/base.py",
     "if isinstance(plan, Plan) and plan.kernel is not None and not is_affine(plan.kernel):",
     "if False:", "laws/test_laws.py"),
    ("laws-mask", "flowrl/laws/transforms.py", "(result.mask & ~before_call.mask).any()",
     "(result.mask & ~before_call.mask).all()", "laws/test_laws.py"),
    ("columns-families", "samplers/step_tree.py", "now = max(parents, 1) if parents < nodes else now",
     "now = max(parents, 1)", "credit/test_tree_parents.py"),
    ("plan-parents", "samplers/step_tree.py", "parents=self.states[:-1],", "parents=(),",
     "credit/test_tree_parents.py"),
    ("comparisons-parent", "flowrl/credit/comparisons.py", "if k and parents == columns.nodes[k - 1]:",
     "if k:", "credit/test_tree_parents.py"),
    ("comparisons-exponential", "flowrl/credit/comparisons.py",
     "return weight / masked_mean(weight, mask, dims).clamp(min=1e-300)", "return weight",
     "credit/test_advantages.py"),
    ("comparisons-prune", "flowrl/credit/comparisons.py", "k > self._last_split(columns)",
     "k >= self._last_split(columns)", "credit/test_advantages.py"),
    ("comparisons-tie", "flowrl/credit/comparisons.py",
     "return torch.where(masked_std(value, mask, 1, 0) > 0, ends, 0.0)", "return ends",
     "credit/test_advantages.py"),
    ("update-totals", "flowrl/losses/base.py", "loss = value.sum() / max(counts.tokens, 1.0)",
     "loss = value.sum() / mask.sum().clamp(min=1)", "run/test_training.py"),
    ("update-deal", "flowrl/iteration/minibatches.py", "(dealt == step)", "(dealt == 0)", "run/test_training.py"),
    ("update-mask", "flowrl/losses/base.py", "sum(), mask.sum()]", "sum(), mask.ne(2).sum()]",
     "run/test_training.py"),
    ("update-rows", "flowrl/losses/base.py", "(value.sum(1) / _lengths(mask)).sum()",
     "value.sum()", "run/test_training.py"),
    ("update-old", "flowrl/iteration/update.py", "sampled_now and chunk.old is None",
     "chunk.old is None", "run/test_training.py"),
    ("update-later", "flowrl/iteration/update.py", "shares[waits:] = [with_old(learner, training, share) for share in shares[waits:]]",
     "shares[waits:] = shares[waits:]", "run/test_training.py"),
    ("update-skip", "flowrl/iteration/update.py", "if math.isfinite(norm):", "if True:",
     "run/test_run.py::test_a_gradient_that_is_not_finite_skips_the_step_and_three_stop_the_run"),
    ("update-tally", "flowrl/iteration/tally.py", "self._add(name, values.double().expand(mask.shape)[on_host(mask)])",
     "self._add(name, values.double().expand(mask.shape).flatten())",
     "run/test_run.py::test_a_tally_is_the_mean_over_unmasked_entries_with_extremes"),
    ("policies-average", "flowrl/session/policies.py", "for key in slow], 1 - d", "for key in slow], d",
     "run/test_policies.py"),
    ("policies-back", "flowrl/session/policies.py", 'self.put("current")', "pass", "run/test_policies.py"),
    ("policies-restore", "flowrl/session/policies.py", 'state[f"{average.name}/{name}"]',
     'state[f"current/{name}"]', "run/test_policies.py"),
    ("collect-behaviour", "flowrl/iteration/sample.py", "session.learner.policies.using(unit.by)", 'session.learner.policies.using("current")',
     "run/test_training.py"),
    ("painting-guidance", "flowrl/models/diffusers/batch.py", "_bind(self.owner.guidance.train,",
     "_bind(self.owner.guidance.sample,", "run/test_training.py"),
    ("steered-window", "samplers/routes/steering.py", "self.first <= iteration < self.stop",
     "self.first <= iteration <= self.stop", "samplers/test_steering.py"),
    ("plan-clean", "samplers/planners.py", "while last > 1 and sigmas[last] < CLEAN:",
     "while last > 1 and sigmas[last] < 0:", "samplers/test_plans.py"),
    ("collect-looked", "flowrl/iteration/features/lookahead.py", "self.count += len(rollout.prompt)",
     "self.count += 0",
     "run/test_steered_training.py"),
    ("units-place", "flowrl/iteration/units.py", "DrawsSlice(unit.first, part.draws)", "DrawsSlice(0, part.draws)",
     "run/test_units.py"),
    ("units-group", "flowrl/iteration/units.py", "group=samples.group + first", "group=samples.group",
     "run/test_units.py"),
    ("units-draws", "flowrl/iteration/units.py", "rows=self.rows[s], first=at,", "rows=self.rows[s], first=0,",
     "run/test_units.py"),
    ("collect-failures", "flowrl/iteration/credit.py", "if lost.any() and not skip", "if lost.all() and not skip",
     "run/test_training.py"),
    ("collect-none-credited", "flowrl/iteration/credit.py", "and not credited.any()",
     "and not scores.complete.any()", "run/test_training.py"),
    ("checkpoint-keep", "flowrl/run/save/checkpoint.py", "reached[-keep:]",
     "reached[-keep - 1 :]", "run/test_training.py"),
    ("runs-crc", "flowrl/session/atomic.py", "if _checksum(present[name]) != entry[1])", "if False)",
     "run/test_interruptions.py::test_a_damaged_checkpoint_is_passed_over"),
    ("runs-sync", "flowrl/session/atomic.py", "for path in folder.rglob(\"*\"):\n        to_disk(path)",
     "pass", "run/test_atomic.py::test_files_are_on_the_disk_before_their_folder_has_its_name"),
    ("runs-beside", "flowrl/session/atomic.py", "_fill(beside, write, listed)\n        except",
     "_fill(folder, write, listed)\n        except",
     "run/test_atomic.py::test_a_write_that_fails_leaves_what_was_there"),
    ("runs-lock", "flowrl/session/atomic.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN",
     "run/test_interruptions.py::test_one_process_at_a_time_trains_in_a_folder"),
    ("runs-first-line", "flowrl/run/train.py", "-1 if resume is None else progress.iteration",
     "progress.iteration",
     "run/test_interruptions.py::test_a_run_killed_between_its_first_line_and_its_first_checkpoint"),
    ("runs-raw", "flowrl/run/save/checkpoint.py", 'f"{folder.name}_raw"), "current")',
     'f"{folder.name}_raw"))', "run/test_peer_defects.py::test_13_raw_and_averaged_weights_and_all"
     "_counters_are_saved"),
    ("runs-prompts", "flowrl/prompts/files.py", "cache_dir=cache if Path(name).is_dir() else None",
     "cache_dir=None",
     "settings/test_damaged_files.py::test_what_a_folder_holds_is_read_anew"),
    ("prompts-shares", "flowrl/prompts/prompt_set.py", "iteration * number, number", "iteration, number",
     "prompts/test_data_sets.py::test_several_data_sets_are_drawn_by_their_sizes_or_weights"),
    ("losses-policy", "flowrl/losses/base.py", '"policy_loss": value.detach()',
     '"policy_loss": (value + divergence).detach()',
     "run/test_peer_defects.py::test_02_the_policys_own_loss_is_logged_beside_the_whole"),
    ("likelihood-mean", "flowrl/likelihoods/transition.py", 'form == "mean":\n        return distance',
     'form == "mean":\n        return distance / 2',
     "run/test_peer_defects_more.py::test_16_divergences_in_all_published_forms"),
    ("finite-infinity", "flowrl/session/finite.py", "flags.append(_largest(parts).isfinite())",
     "flags.append(~_largest(parts).isnan())", "run/test_finite.py"),
    ("finite-least", "flowrl/session/finite.py", "torch.stack(ends).abs().amax(1)",
     "torch.stack(ends)[:, 1].abs()", "run/test_finite.py"),
    ("page-places", "flowrl/run/show/page_records.py", "copy, place=first + i,", "copy, place=i,",
     "run/test_page_records.py"),
    ("page-stamp", "flowrl/models/diffusers/call/inputs/columns.py", "return _all_opened(files, _stamps(files))",
     "return _all_opened(files, (None,) * len(files))", "models/test_pipeline_images.py"),
    ("page-white", "flowrl/models/diffusers/call/inputs/columns.py", "return to_rgb(open_image_file(file) if",
     'return Image.Image.convert(open_image_file(file) if', "models/test_pipeline_images.py"),
    ("finite-averages", "flowrl/session/policies.py", 'yield f"the average {average.name}", weight', "pass",
     "run/test_finite.py"),
    ("origin-decay", "flowrl/run/save/model_state.py",
     "update_settings(learner.optimizer, learner.run.train)", "pass", "run/test_start_record.py"),
    ("origin-kinds", "flowrl/session/start_record.py", "if kind is OnResume.NEVER:", "if False:",
     "run/test_start_record.py"),
    ("checkpoint-best", "flowrl/run/save/checkpoint.py", "not score > progress.best",
     "not score < progress.best", "run/test_training.py"),
    ("checkpoint-alarms", "flowrl/run/save/checkpoint.py", 'alarms.restore(alarm_state)', "True",
     "run/test_training.py"),
    ("checkpoint-optimizer", "flowrl/run/save/model_state.py",
     "load_state(learner.optimizer, learner.policies.parameters.values(), optimizer)", "pass", "run/test_training.py"),
    ("shapes-diagonal", "rewards/catalogue/shapes.py", "along >= DIAGONAL * abs(across)",
     "along >= abs(across)", "demo/test_shapes.py"),
    ("shapes-extra", "rewards/catalogue/shapes.py", "return score * EXTRA**extra", "return score",
     "demo/test_shapes.py"),
    ("shapes-colours", "rewards/catalogue/shapes.py", "min(credit) >= 0.5", "min(credit) > 0",
     "demo/test_shapes.py"),
    ("shapes-speck", "rewards/catalogue/shapes.py", "if area < LEAST_AREA:", "if area <= 0:",
     "demo/test_shapes.py"),
    ("shapes-above", "rewards/catalogue/shapes.py", '"above": (dy, dx)', '"above": (-dy, dx)',
     "demo/test_shapes.py"),
    ("shapes-unread", "rewards/catalogue/shapes.py", 'float("nan") if want is None', "0.0 if want is None",
     "demo/test_shapes.py"),
    ("shapes-first", "rewards/catalogue/shapes.py", "!= wanted.things[0]:", "== wanted.things[0]:",
     "demo/test_shapes.py"),
    *PROCESS_ROWS,
    *TEXT_ROWS,
    *RECIPE_ROWS, *MODEL_ROWS, *ALARM_ROWS, *REWARD_ROWS, *SOUND_ROWS, *THROUGH_ROWS,
    *EDGE_ROWS, *KIND_ROWS, *VOTE_ROWS, *TRUST_ROWS, *SANDBOX_ROWS,
)]
# fmt: on


def copied(folder: Path, tree: Path = PROJECT) -> None:
    """Copy the files of a tree that git tracks, with changes of the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=tree, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():  # not one that was deleted just now
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)


def preload() -> None:
    """Import the large packages once: a forked child finds them loaded, and flowrl's own are new."""
    for name in PACKAGES:
        importlib.import_module(name)
    torch.set_num_threads(1)  # a pool of threads would not survive the fork


def enter(folder: Path, output: Path) -> None:
    """In a child process: import from a copied tree, and write what is printed into a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()
    os.chdir(folder)
    # compiled files differ by second and size only, which a mutant may share
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != PROJECT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]


def run_pytest(folder: Path, tests: Sequence[str], output: Path, cpu: float | None) -> None:
    """In a child process: the tests of a copied tree; pytest's exit code is the process's."""
    enter(folder, output)
    if cpu is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu), math.ceil(cpu) + 5))
    paths = [f"tests/{test}" for test in tests]
    if all("::" in test for test in tests):
        paths += ["-m", "not gpu"]  # a test that is named counts, even if it is slow
    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *paths])))


def tested(
    folder: Path, tests: Sequence[str], patience: float = PATIENCE, cpu: float | None = None
) -> tuple[int, str]:
    """(pytest's exit code, its output): 0 all passed, 1 a test failed, 2 and more no verdict.

    `patience` is in seconds; so is `cpu`, of a processor's time, which other programs do not spend.
    """
    output = folder.with_name(f"{folder.name}.txt")
    child = multiprocessing.get_context("fork").Process(
        target=run_pytest, args=(folder, tests, output, cpu)
    )
    child.start()
    child.join(patience)
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return 1, f"no end after {patience:.0f} s"
    return child.exitcode % 256, output.read_text()


def survives(mutant: Mutant, folder: Path) -> bool:
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.find) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.find!r} is not once in {mutant.file}")
    path.write_text(text.replace(mutant.find, mutant.put))
    try:
        code, output = tested(folder, mutant.tests.split())
    finally:
        path.write_text(text)
    if code > 1:
        print(f"pytest came to no verdict ({code}):\n{output[-2000:]}")
    return code != 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="those whose name begins with one")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if mutant.name.startswith(tuple(given.only))]
    if not chosen:
        raise SystemExit(
            f"no mutant's name begins with {' or '.join(given.only)}; --list shows them"
        )
    if given.list:
        for m in chosen:
            print(f"{m.name:<26} {m.file}: {m.find}  ->  {m.put or '(nothing)'}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        alive = survivors(chosen, Path(name), given.jobs)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught", *alive)
    return 1 if alive else 0


def survivors(chosen: Sequence[Mutant], parent: Path, jobs: int) -> list[str]:
    """The names of mutants that no test catches; each job has a copy of the tree."""
    preload()
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for job in range(jobs):
        copied(parent / str(job))
        folders.put(parent / str(job))
    tests = sorted({test for m in chosen for test in m.tests.split()})
    code, output = tested(parent / "0", tests, 6 * PATIENCE)
    if code != 0:
        raise SystemExit(f"the tests fail without any mutant\n{output}")

    def judge(mutant: Mutant) -> str | None:
        folder, start = folders.get(), time.monotonic()
        try:
            lives = survives(mutant, folder)
        finally:
            folders.put(folder)
        verdict = "SURVIVED" if lives else "caught"
        print(f"{verdict:<9} {mutant.name} ({time.monotonic() - start:.0f} s)", flush=True)
        return mutant.name if lives else None

    with ThreadPoolExecutor(jobs) as pool:
        return [name for name in pool.map(judge, chosen) if name is not None]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
