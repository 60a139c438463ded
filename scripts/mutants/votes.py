"""Mutants of votes and of the reward that is fitted to them. `run.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

DAVIDSON, HEADS = "rewards/fitted/davidson.py", "rewards/fitted/heads.py"
PLAN, LOG, ANSWER = (f"flowrl/votes/{name}.py" for name in ("plan", "log", "answer"))
DOOR = "flowrl/votes/door.py"
MODEL, FITTED = "rewards/test_davidson.py", "rewards/test_fitted.py"
VOTES, PAGE = "votes/test_votes.py", "votes/test_vote_page.py"

# fmt: off
ROWS = (
    ("votes-curvature", DAVIDSON, "by_margin = (p[:, 0] + p[:, 1] - difference**2) / 4",
     "by_margin = (p[:, 0] + p[:, 1] - difference**2) / 2",
     f"{MODEL}::test_the_posterior_is_that_of_a_long_chain"),
    ("votes-half-margin", DAVIDSON, "np.stack([margin / 2, -margin / 2,", "np.stack([margin, -margin,",
     f"{MODEL}::test_the_probabilities_are_davidsons"),
    ("votes-prior-outside", DAVIDSON, "/ self.ridge\n", "* 0\n",
     f"{MODEL}::test_outside_of_what_votes_span_the_posterior_is_the_prior"),
    ("votes-leak", HEADS, "rest = pairs.where(pairs.fold != fold)", "rest = pairs",
     f"{FITTED}::test_no_held_out_prompt_leaks_into_its_head"),
    ("votes-leaked-ridge", HEADS, "choose_ridge(pairs).ridge for fold, pairs in", "choose_ridge(self).ridge for fold, pairs in",
     f"{FITTED}::test_a_head_has_the_same_bits_whatever_its_held_out_prompts_say"),
    ("votes-leaked-choice", HEADS, "in enumerate(_path(pairs.where(pairs.fold != fold), ridges))", "in enumerate(_path(pairs, ridges))",
     f"{FITTED}::test_the_ridge_is_weak_for_a_taste_and_strong_for_noise"),
    ("votes-group-mean", HEADS, "return self.model.deviation(x - mean[place])", "return self.model.deviation(x)",
     f"{FITTED}::test_deviations_are_of_the_difference_to_the_mean_of_the_group"),
    ("votes-same-side", PLAN, "Showing(pairs[i], not left[i], True)", "Showing(pairs[i], bool(left[i]), True)",
     f"{VOTES}::test_one_pair_in_ten_is_asked_again_with_sides_changed_and_late"),
    ("votes-side", ANSWER, 'float((vote.verdict == "left") == a_left)', 'float(vote.verdict == "left")',
     f"{VOTES}::test_the_answer_says_what_people_prefer_with_interval_and_consistency"),
    ("votes-twice", LOG, "        if votes.has_given(showing):\n            return False\n", "",
     f"{VOTES}::test_a_vote_that_arrives_twice_counts_once_and_an_old_one_is_refused"),
    ("votes-token-again", DOOR, "if rater is None or token in self.used:", "if rater is None:",
     f"{PAGE}::test_a_token_is_exchanged_once_for_a_cookie_and_a_redirect"),
    ("votes-any-name", DOOR, "if not allowed_host(host, self.bound):", "if False:",
     f"{PAGE}::test_only_names_that_are_ours_are_answered"),
)
