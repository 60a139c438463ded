"""Mutants of how a pipeline is driven and replayed. `mutants.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

ZOO = "models/test_pipeline_zoo.py"
BEGUN = f"{ZOO}::test_a_loop_that_begins_at_a_picture"
PAINTED = f"{ZOO}::test_a_painting_begins_at_its_pictures_and_samples_at_its_own_guidance"
DRIVEN = f"{ZOO}::test_any_pipeline_is_driven_to_the_bit"
REFUSED = f"{ZOO}::test_what_our_samplers_cannot_step_is_refused"
START = "models/test_pipeline_start.py::test_a_sample_is_the_pipelines_own"
NEIGHBOURS = "models/test_proof_neighbours.py::test_a_hundredth_of_a_neighbour_is_refused"
LEVELS = "models/test_own_levels.py"
LATER = "models/test_proof_neighbours.py::test_the_states_dtype_after_the_first_step_is_kept"
EPSILON = "models/test_pipeline_epsilon.py"
HYBRID = "models/test_hybrid.py::test_the_last_steps_are_the_bases"
FORMATS = "models/test_lora_formats.py"

ENCODED = "models/test_media_encoder.py"

# fmt: off
ROWS = (
    ("given-shift", "flowrl/models/diffusers/media_encoder.py", ".to(self.scale) - self.shift)",
     ".to(self.scale) + self.shift)", ENCODED),
    ("given-scale", "flowrl/models/diffusers/media_encoder.py", "- self.shift) / self.scale",
     "- self.shift) * self.scale", ENCODED),
    ("given-place", "flowrl/models/diffusers/media_encoder.py", "x[self.place] = (z", "x[:] = (z", ENCODED),
    ("given-pixels", "flowrl/models/diffusers/media_encoder.py", "(2 * media - 1).to(", "(media).to(",
     ENCODED),
    ("levels-unshifted", "flowrl/models/diffusers/own_levels.py", '"use_dynamic_shifting": False,', "",
     LEVELS),
    ("levels-whole", "flowrl/models/diffusers/whole_sample.py", "self.policy.loop.driver.real",
     "self.policy.pipe.scheduler", LEVELS),
    ("levels-kept", "flowrl/models/diffusers/kept_proofs.py", "loop.levels.at(loop.levels.trial)", "None",
     LEVELS),
    ("levels-checked", "flowrl/models/diffusers/signature.py", "self.levels.check(schedule, steps, self.name)",
     "pass", LEVELS),
    ("beginning-size", "flowrl/models/diffusers/image_to_image.py", "CleanPart(nothing * (sigma / size),",
     "CleanPart(nothing,", BEGUN),
    ("beginning-level", "flowrl/models/diffusers/image_to_image.py",
     "if not any(math.isclose(size, one, rel_tol=NEAR_STATE) for one in known):", "if False:",
     f"{ZOO}::test_a_beginning_of_another_kind_is_refused"),
    ("beginning-pure", "flowrl/models/diffusers/policy.py", "picture.to(noise)[prompt] + sigma * noise",
     "noise", BEGUN),
    ("painting-begin", "flowrl/models/diffusers/batch.py",
     "begin = owner.begin(self.conditioning, self.steps)", "begin = None", PAINTED),
    ("painting-sampled", "flowrl/models/diffusers/batch.py",
     "velocity = self._bind(owner.guidance.sample,",
     "velocity = self._bind(owner.guidance.train,", PAINTED),
    ("hybrid-level", "flowrl/models/diffusers/hybrid.py", ".sigmas[steps - self.last]",
     ".sigmas[steps - self.last - 1]", HYBRID),
    ("hybrid-weights", "flowrl/models/diffusers/hybrid.py", "denoiser.disable_adapters()", "pass", HYBRID),
    ("lora-fused-rows", "flowrl/models/diffusers/lora_formats.py", "        row += height\n    return",
     "    return", FORMATS),
    ("lora-fused-ranks", "flowrl/models/diffusers/lora_formats.py", "column += block.shape[1]", "pass", FORMATS),
    ("lora-alpha", "flowrl/models/diffusers/lora_formats.py", "made.scale * len(made.down)", "made.scale", FORMATS),
    ("lora-metadata", "flowrl/models/diffusers/lora_formats.py", 'metadata.get(f"{part}.lora_alpha", rank)', "rank",
     FORMATS),
    ("lora-order", "flowrl/models/diffusers/lora_keys.py",
     "transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_v -> double_blocks",
     "transformer_blocks.N.attn.to_k transformer_blocks.N.attn.to_q transformer_blocks.N.attn.to_v -> double_blocks",
     FORMATS),
    ("lora-xl-blocks", "flowrl/models/diffusers/lora_keys.py", "int(match[2]) + 1}.1.", "int(match[2])}.1.", FORMATS),
    ("painting-media", "flowrl/models/diffusers/batch.py", "self.conditioning.take(prompt.cpu())",
     "self.conditioning.take([0] * len(prompt))", PAINTED),
    ("replay-euler", "flowrl/models/diffusers/proof_steps.py",
     "if type(self.scheduler) is FLOW_EULER and away > self.tolerance * size:", "if False:",
     f"{ZOO}::test_a_loop_whose_later_steps_are_not_eulers_is_refused"),
    ("replay-first", "flowrl/models/diffusers/proof_steps.py",
     "if away > self.tolerance * size or turned < away:",
     "if False:", f"{ZOO} {EPSILON} models/test_pipeline_refusals.py"),
    ("replay-alone", "flowrl/models/diffusers/proof_neighbours.py", "if not away <= limit:", "if False:",
     f"{ZOO}::test_rows_that_know_of_each_other_are_refused"),
    ("replay-start", "flowrl/models/diffusers/proof_steps.py",
     "if not away <= ROUNDINGS *", "if False and away <= ROUNDINGS *",
     "models/test_pipeline_start.py::test_a_first_state_that_is_not_the_pipelines_is_refused"),
    ("start-scale", "flowrl/models/diffusers/signature.py", "size /= scale(", "size *= scale(", START),
    ("last-level", "flowrl/models/diffusers/schedule.py", "return min(last, 0.9999 * before)",
     "return 0.0", START),
    ("last-latents", "flowrl/models/diffusers/signature.py", "return x if last == 0 else to_vp(",
     "return x if True else to_vp(", START),
    ("neighbours-kept", "flowrl/models/diffusers/proof_neighbours.py", "same, away, beside = [1, 1, 2],",
     "same, away, beside = [0, 1, 2],", NEIGHBOURS),
    ("whole-bound", "flowrl/models/diffusers/whole_proof.py", "if not ours <= times *",
     "if False and ours <= times *", "models/test_whole_proof.py::test_a_wrong_number_is_a_failure"),
    ("whole-nudge", "flowrl/models/diffusers/whole_sample.py",
     'latents = nudged(self.given, unit) if unit else self.given', 'latents = self.given',
     "models/test_whole_proof.py::test_whole_samples_are_the_pipelines_own"),
    ("kept-sum", "flowrl/models/diffusers/kept_proofs.py",
     'if written["sum"] != _sum(written["proof"]):', "if False:",
     "models/test_kept_proofs.py::test_a_damaged_entry_counts_as_none"),
    ("kept-sources", "flowrl/models/diffusers/kept_proofs.py", '"sources": sorted({*_sources(classes)}),',
     '"sources": [],', "models/test_kept_proofs.py::test_the_source_of_an_own_pipeline_is_in_the_digest"),
    ("kept-sign", "flowrl/models/diffusers/kept_proofs.py",
     'form=traits["form"], sign=traits["sign"], later=later)', "later=later)",
     "models/test_kept_proofs.py::test_traits_that_only_the_proof_finds_are_kept"),
    ("kept-later", "flowrl/models/diffusers/kept_proofs.py",
     'sign=traits["sign"], later=later)', 'sign=traits["sign"])', LATER),
    ("later-first", "flowrl/models/diffusers/signature.py",
     "call = replace(call, held=None)", "pass", LATER),
    ("later-held", "flowrl/models/diffusers/latents.py",
     "outputs[at] = outputs[at].to(dtype)", "pass", LATER),
    ("shapes-between", "flowrl/models/diffusers/columns.py", "(1, 2), (4, 3), (3, 4)", "(1, 2)",
     "models/test_pipeline_refusals.py::test_latents_of_the_pictures_shape_are_refused"),
    ("kept-weights", "flowrl/run/model_proof.py", '"base": origin.base,', '"base": {},',
     "cli/test_prove.py::test_other_weights_are_proven_again"),
    ("probe-texts", "flowrl/models/diffusers/traits.py", "**dict.fromkeys(texts, prompt)}",
     "}", "models/test_proof_neighbours.py::test_negative_prompts_as_a_column_of_any_lengths"),
    ("replay-between", "flowrl/models/diffusers/proof_checks.py", "if away != 0:", "if False:",
     "models/test_pipeline_refusals.py models/test_pipeline_images.py"),
    ("replay-states", "flowrl/models/diffusers/proof_checks.py", "if seen != {rows}:", "if False:", REFUSED),
    ("conditioning-blocks", "flowrl/models/diffusers/conditioning.py", "index + rows * block for block",
     "index for block", f"{ZOO} models/test_conditioning.py"),
    ("conditioning-mask", "flowrl/models/diffusers/conditioning.py", "return torch.ones(rows, tokens,",
     "return torch.zeros(rows, tokens,", "models/test_conditioning.py models/test_pipeline.py"),
    ("schedule-train", "flowrl/models/diffusers/schedule.py",
     "return self.train * self._own(sigma.to(torch.float32))",
     "return self._own(sigma.to(torch.float32))", "models/test_pipeline.py models/test_families.py"),
    ("schedule-scaled", "flowrl/models/diffusers/schedule.py", "found = found / (1 + found)",
     "found = found / (2 + found)", EPSILON),
    ("entry-numbers", "flowrl/models/diffusers/latents.py", "torch.Generator().manual_seed(1)) + 0.5",
     "torch.Generator().manual_seed(0))", DRIVEN),
)
# fmt: on
