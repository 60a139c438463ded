"""Mutants of published reward models and judges, and of rewards of motion. `run.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

HEADS = "rewards/test_scalar_heads.py"
JUDGES = "rewards/test_published_judges.py"
VIDEO = "rewards/test_video_rewards.py"
SAFE = "rewards/test_safety.py"
BENCH = "rewards/test_benchmark_judges.py"
MPS = "rewards/test_mps.py"
FLANT5 = "rewards/test_clip_flant5.py"
AUTHORS = "rewards/test_authors.py"
EDITS = "evaluation/test_edit_preferences.py"

SHAPE_EDITS = "demo/test_edit_world.py"

# fmt: off
ROWS = (
    ("qwen-positions", "rewards/perception/qwen.py", "position_ids=steps,", "position_ids=steps // 2,",
     f"{HEADS}::test_hpsv3_is_its_second_computation"),
    ("flant5-rows", "rewards/catalogue/clip_flant5.py", "logits[..., : len(self.tokenizer)]", "logits",
     f"{AUTHORS}::test_clip_flant5_scores_as_the_authors"),
    ("flant5-cut", "rewards/catalogue/clip_flant5.py", "LONGEST - len(before) - 1", "LONGEST",
     f"{AUTHORS}::test_clip_flant5_scores_as_the_authors"),
    ("compbench-places", "rewards/catalogue/compbench.py", " if chunk.text not in LEFT_OUT_PHRASES", "",
     f"{BENCH}::test_compbench_asks_about_things_and_not_about_places"),
    ("qwen-order", "rewards/perception/qwen.py", "cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)",
     "cut.permute(0, 3, 4, 6, 7, 2, 1, 5, 8)", f"{HEADS}::test_patches_are_the_processors"),
    ("qwen-enlarge", "rewards/perception/qwen.py", "math.ceil(side * scale / FACTOR)",
     "math.floor(side * scale / FACTOR)", f"{HEADS}::test_images_have_the_published_sizes"),
    ("qwen-vocabulary", "rewards/perception/qwen.py", "len(embedding) != len(tokenizer)",
     "len(embedding) < len(tokenizer)", f"{HEADS}::test_other_layouts_are_refused"),
    ("videoalign-merge", "rewards/catalogue/videoalign.py", "value.float() + scale * (b.float()",
     "value.float() + 1.0 * (b.float()", f"{HEADS}::test_videoalign_is_its_second_computation"),
    ("videoalign-diagonal", "rewards/catalogue/videoalign.py", '"nke,ke->nk"', '"nke,je->nj"',
     f"{HEADS}::test_videoalign_is_its_second_computation"),
    ("videoalign-frames", "rewards/catalogue/videoalign.py", "2 * round(wanted / 2)", "2 * int(wanted / 2)",
     f"{HEADS}::test_frames_are_those_of_the_authors"),
    ("soft-tifa-mean", "rewards/catalogue/soft_tifa.py", "of_row.log().mean().exp() if", "of_row.mean() if",
     f"{JUDGES}::test_soft_tifa_sums_the_first_tokens_of_an_answers_forms"),
    ("token-mass-case", "rewards/judging/token_mass.py", "mass.get(form, 0.0)", "mass.get(form.strip(), 0.0)",
     f"{JUDGES}::test_soft_tifa_sums_the_first_tokens_of_an_answers_forms"),
    ("editscore-minimum", "rewards/catalogue/editscore.py", "self._votes(of_both, min) * quality",
     "self._votes(of_both, max) * quality", f"{JUDGES}::test_editscore_is_the_root_of_two_minima"),
    ("deqa-weights", "rewards/catalogue/deqa.py", "(1.0, 0.75, 0.5, 0.25, 0.0)", "(1.0, 0.8, 0.5, 0.25, 0.0)",
     f"{JUDGES}::test_five_words_are_weighed_by_their_softmax"),
    ("motion-threshold", "rewards/catalogue/motion.py", "THRESHOLD = 6 / 256", "THRESHOLD = 5 / 256",
     f"{VIDEO}::test_motion_is_the_largest_steps_over_vbenchs_threshold"),
    ("motion-side", "rewards/perception/motion.py", "_moved(first, -down, -right)", "_moved(first, down, right)",
     f"{VIDEO}::test_the_middle_of_an_even_motion_is_known"),
    ("motion-shortest", "rewards/perception/motion.py", "STILL = 0.002", "STILL = -0.002",
     f"{VIDEO}::test_blocks_find_whole_steps"),
    ("consistency-first", "rewards/catalogue/consistency.py", "vectors[1:] * vectors[0]", "vectors[1:] * vectors[1:]",
     f"{VIDEO}::test_consistency_compares_with_the_frame_before_and_the_first"),
    ("dreamsim-centre", "rewards/catalogue/dreamsim.py", "whole - whole.mean(-1, keepdim=True)", "whole",
     "rewards/test_dreamsim.py::test_dreamsim_is_its_second_computation"),
    ("dreamsim-quick", "rewards/perception/plain_vit.py", "(1.702 * inner).sigmoid()", "inner.sigmoid()",
     "rewards/test_dreamsim.py::test_dreamsim_is_its_second_computation"),
    ("safety-special", "rewards/catalogue/safety.py", "+ SPECIAL * special[:, None]", "",
     f"{SAFE}::test_concepts_are_flagged_as_by_diffusers"),
    ("dpg-order", "rewards/catalogue/dpg_bench.py", "if any(value[parent] == 0 for", "if all(value[parent] == 0 for",
     f"{BENCH}::test_dpg_zeroes_what_depends_on_a_no_and_counts_before"),
    ("compbench-product", "rewards/catalogue/compbench.py", "math.prod(answers) if answers", "min(answers) if answers",
     f"{BENCH}::test_compbench_multiplies_the_chances_of_its_noun_phrases"),
    ("tally-primary", "rewards/judging/tally.py", 'dimension.partition("-")[0]', 'dimension.rpartition("-")[0]',
     f"{BENCH}::test_unigenbench_is_the_share_of_right_points_and_counts_each_once"),
    ("mps-mask", "rewards/catalogue/mps.py", "(words @ condition.T).amax(1)", "(words @ condition.T).amin(1)",
     f"{MPS}::test_the_score_is_its_second_computation"),
    ("mps-rotation", "rewards/catalogue/mps.py", "torch.cat([-second, first], -1)", "torch.cat([second, first], -1)",
     f"{MPS}::test_halves"),
    ("clip-flant5-layer", "rewards/catalogue/clip_flant5.py", "states[-2][:, 1:]", "states[-1][:, 1:]",
     f"{FLANT5}::test_the_score_is_the_geometric_mean_of_yes_and_the_end"),
    ("clip-flant5-mean", "rewards/catalogue/clip_flant5.py", "chances.mean(1).exp()", "chances.sum(1).exp()",
     f"{FLANT5}::test_the_score_is_the_geometric_mean_of_yes_and_the_end"),
    ("shapes-kept", "rewards/catalogue/shapes.py", "key = (digest, plain.dtype,", "key = (plain.dtype,",
     "demo/test_shapes.py"),
    ("edit-rest", "rewards/catalogue/edit_shapes.py", "return change * score * EXTRA ** len(left)",
     "return change * EXTRA ** len(left)",
     f"{SHAPE_EDITS}::test_a_right_edit_that_changes_another_object_is_wrong"),
    ("edit-extra", "rewards/catalogue/edit_shapes.py", "score * EXTRA ** len(left)", "score",
     f"{SHAPE_EDITS}::test_grades_by_hand"),
    ("edit-direction", "rewards/catalogue/edit_shapes.py", "(dx * towards[1] + dy * towards[0])",
     "(dx * towards[0] + dy * towards[1])", f"{SHAPE_EDITS}::test_grades_by_hand"),
    ("edit-place", "rewards/catalogue/edit_shapes.py", "_likeness(thing, match, _distance(thing, match) <= SAME_PLACE)",
     "_likeness(thing, match, True)", f"{SHAPE_EDITS}::test_a_right_edit_that_changes_another_object_is_wrong"),
    ("piece-corner", "rewards/perception/files.py", "(x, y, x + width, y + height))",
     "(y, x, y + width, x + height))",
     "rewards/test_image_files.py::test_a_piece_of_a_sheet_is_read"),
    ("edit-ranks", "flowrl/evaluation/edit_preferences.py", "float(first < second)", "float(first > second)",
     f"{EDITS}::test_editreward_bench_of_the_hub_and_of_its_files"),
)
