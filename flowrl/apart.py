"""How far samples are from the start: what a KL that is taken off the reward is made of."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.rows import Rows, take
from flowrl.session import Session


@runtime_checkable
class Whole(Protocol):
    """A likelihood whose samples have a log-probability: the sum of their entries'."""

    def whole(self, rollout: Any) -> tuple[Rows, Int[Tensor, " b"]]: ...  # and which samples


@torch.no_grad()
def measured(session: Session, policy: Any, rollout: Any) -> Float[Tensor, " n"]:
    """log p(sample) under the policy that sampled, less that under the start, in nats: the k1
    estimate of KL(policy | start) of a whole sample, of either sign. 0 for samples that no rows
    are of (greedy ones).

    Stored log-probabilities are the sampler's, unless another engine drew them or the run
    recomputes them (`train.recompute_old`).
    """
    likelihood, behaviour = session.algorithm.likelihood, session.algorithm.behaviour
    assert isinstance(likelihood, Whole), "Algorithm refuses others"
    rows, samples = likelihood.whole(rollout)
    if rows.old is None or session.run.train.recompute_old:
        old = _says(session, behaviour, policy, rows)
    else:
        old = rows.old.logp
    apart = (old - _says(session, "ref", policy, rows)).double().masked_fill(~rows.mask, 0.0)
    found = apart.new_zeros(len(rollout.prompt))
    found[samples] = apart.sum(1)
    return found


def _says(session: Session, name: str, policy: Any, rows: Rows) -> Float[Tensor, "b t"]:
    """Log-probabilities under the weights of that name."""
    most = session.policy.rows_per_call
    assert most is not None  # the session chose it
    with session.policies.using(name):
        chunks = torch.arange(len(rows.prompt), device=rows.prompt.device).split(most)
        said = [session.algorithm.likelihood.evaluate(policy, take(rows, i)).logp for i in chunks]
    return torch.cat(said)
