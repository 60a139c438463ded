"""Mutants of what several processes share, and of what compiled blocks need. `mutants.py` runs
them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

STEPS = "run/test_interruptions.py::test_three_in_a_row_are_optimizer_steps_whatever_iteration_they_are_of"
SHARING = "processes/test_sharing.py"
DEAL, INPUTS = "flowrl/run/deal.py", "run/test_shared_inputs.py"
STATES, EXPERTS = "samplers/test_storage.py", "models/test_experts.py"
SHARED_OLD = "run/test_shared_old.py"
TRANSFERS = "run/test_iteration_transfers.py"
ONCE = "test_training_evaluates_each_distinct_input_once"

# fmt: off
ROWS = (
    ("update-third", "flowrl/run/update.py", "return 0 if math.isfinite(norm) else before",
     "return before if math.isfinite(norm) else before", STEPS),
    ("deal-draw", DEAL, '"deal", self.iteration, draw, place)', '"deal", self.iteration, at, place)',
     f"{INPUTS}::test_the_deal_is_of_inputs_whatever_the_order_of_rows_and_the_processes"),
    ("deal-turns", DEAL, "first = draw + place if", "first = draw if",
     f"{INPUTS}::test_one_state_per_step_does_not_send_a_draw_into_one_optimizer_step"),
    ("deal-together", DEAL, "(dealt % self.updates)[inputs]",
     "((dealt[inputs] + torch.arange(len(inputs))) % self.updates)",
     f"{INPUTS}::test_the_deal_is_of_inputs_whatever_the_order_of_rows_and_the_processes"),
    ("deal-calls", DEAL, "(places // most)", "(torch.arange(len(places)) // most)",
     f"{INPUTS}::test_the_deal_is_of_inputs_whatever_the_order_of_rows_and_the_processes"),
    ("storage-ratio", "samplers/walk.py", "        x_next = self.rounded(plan, x_next)\n", "", STATES),
    ("storage-once", "samplers/walk.py", "after.stored = keep.put(x_next)",
     "x_next = keep.put(x_next)", STATES),
    ("storage-restored", "flowrl/likelihoods/rows.py", "value.to(sigma.device, sigma.dtype)",
     "value.to(sigma.device)", STATES),
    ("storage-evaluations", "samplers/walk.py", "self.latents.storage.rounded(x) if trained else x",
     "self.latents.storage.rounded(x)", STATES),
    ("experts-graph", "flowrl/models/diffusers/experts.py", "and other.awake and not other.graded",
     "and other.awake", EXPERTS),
    ("experts-adapters", "flowrl/models/diffusers/experts.py",
     "(p for p in others if not p.requires_grad)", "(p for p in others)", EXPERTS),
    ("experts-rest", "flowrl/models/diffusers/experts.py", "                other.awake = False\n",
     "", EXPERTS),
    ("reference-bare", "flowrl/run/policies.py", 'self._switch(name != "ref")', "self._switch(True)",
     SHARED_OLD),
    ("reference-placed", "flowrl/run/policies.py", "        self._placed = name\n",
     "        self._placed = self.inside\n", "run/test_policies.py"),
    ("old-shared", "flowrl/run/update.py", "before = None if share is not shares[0] else",
     "before =", SHARED_OLD),
    ("transfers-counts", "flowrl/losses/base.py", "floats(torch.stack(counts).sum(0).double())",
     "(float(sum(c[i] for c in counts)) for i in (0, 1))", TRANSFERS),
    ("inputs-prompt", "flowrl/likelihoods/rows.py", "torch.stack([rows.prompt, rows.state], 1)",
     "torch.stack([rows.state, rows.state], 1)",
     f"{INPUTS}::test_a_replayed_sample_among_siblings_has_its_own_state"),
    ("inputs-equal", "flowrl/likelihoods/rows.py", "flatten(1).any(1)", "flatten(1).all(1)",
     f"{INPUTS}::test_equal_neighbours_have_one_number"),
    ("inputs-selected", "flowrl/likelihoods/rows.py", "index_select(0, number)",
     "index_select(0, number.flip(0))",
     f"{INPUTS}::test_a_replayed_sample_among_siblings_has_its_own_state"),
    ("inputs-once", "flowrl/likelihoods/transition.py", "None if before == after else",
     "None if True else",
     f"{INPUTS}::test_a_replayed_sample_among_siblings_has_its_own_state"),
    ("inputs-direction", "flowrl/likelihoods/directional.py", "state=states_of(rollout, edges)",
     "state=None", f"{INPUTS}::{ONCE}[fdfo]"),
    ("inputs-noise", "flowrl/likelihoods/matching.py", "not self.same_noise or", "True or",
     f"{INPUTS}::{ONCE}[dgpo]"),
    ("inputs-promised", "samplers/plan.py", "for n, step in zip(self.states, self.steps",
     "for n, step in zip(self.nodes, self.steps",
     f"{INPUTS}::test_the_deal_is_of_inputs_whatever_the_order_of_rows_and_the_processes"),
    ("lockstep-weight", "flowrl/processes/lockstep.py", "(result * 0).sum()", "(result * 1).sum()",
     SHARING),
    ("lockstep-policy", "flowrl/processes/lockstep.py", "weights.put(weights.names[call.policy])",
     "pass", SHARING),
    ("lockstep-cache", "flowrl/processes/lockstep.py", "            return\n        size",
     "            pass\n        size", SHARING),
    ("lockstep-smallest", "flowrl/processes/lockstep.py", "size < self._seen[index][0]",
     "size > self._seen[index][0]", SHARING),
    ("sharding-used", "flowrl/processes/sharding.py", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN",
     SHARING),
    ("sharding-bucket", "flowrl/processes/sharding.py", "yield bucket\n            bucket = []",
     "yield bucket", SHARING),
    ("sharding-norm", "flowrl/processes/sharding.py", "    dist.all_reduce(pieces)\n", "",
     "processes/test_fsdp2.py"),
    ("compile-limit", "flowrl/models/savings.py", "GRAPHS = 64", "GRAPHS = 8",
     "models/test_compile.py::test_a_compiled_demo_is_compiled_to_its_end"),
    ("context-twice", "flowrl/processes/parallel.py", "[mine] if self.leads else []", "[mine]",
     "processes/test_context_parallel.py"),
    ("context-draws", "flowrl/processes/parallel.py",
     "self.rank // self.members, self.processes // self.members", "self.rank, self.processes",
     "processes/test_context_parallel.py"),
    ("context-attention", "flowrl/processes/context_parallel.py", "processor._parallel_config = config",
     "processor._parallel_config = None",
     "processes/test_context_parallel.py::test_shared_calls_end_in_the_weights_of_whole_ones"),
    ("context-nan", "flowrl/processes/context_parallel.py", "if not away <= STEP_TOLERANCE[ours.dtype]:",
     "if away > STEP_TOLERANCE[ours.dtype]:", "processes/test_context_parallel.py"),
)
# fmt: on
