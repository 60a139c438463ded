"""How far samples are from the start: what a KL that is taken off the reward is made of."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import Rows, take
from flowrl.run.session import Session


@runtime_checkable
class Whole(Protocol):
    """A likelihood whose samples have a log-probability: the sum of their entries'."""

    def whole(self, rollout: Any) -> tuple[Rows, Int[Tensor, " b"]]: ...  # and which samples


@torch.no_grad()
def reference_log_ratios(session: Session, policy: Any, rollout: Any) -> Float[Tensor, "n t"]:
    """log p of each entry under the policy that sampled, less that under the start, in nats: the k1
    estimate of KL(policy | start), of either sign; a sample's sum is its own. NaN where there is
    nothing of the policy's: behind the end, in what it was told, and in samples that no rows are of
    (greedy ones). UserError where the model says what is no number.

    Stored log-probabilities are the sampler's, unless another engine drew them or the run
    recomputes them (`train.recompute_old`).
    """
    likelihood, behaviour = session.algorithm.likelihood, session.algorithm.behaviour
    assert isinstance(likelihood, Whole), "Algorithm refuses others"
    rows, samples = likelihood.whole(rollout)
    if rows.old is None or session.run.recomputes_old:
        old = _says(session, behaviour, policy, rows)
    else:
        old = rows.old.logp
    apart = (old - _says(session, "ref", policy, rows)).double()
    found = apart.new_full((len(rollout.prompt), apart.shape[1]), torch.nan)
    if not apart[rows.mask].isfinite().all():
        raise UserError(
            "the model's log-probabilities are no finite numbers any more; lower train.lr or use "
            f"model.dtype: float32. The last good weights are in {session.folder / 'best'}"
        )
    found[samples] = apart.masked_fill(~rows.mask, torch.nan)
    return found


def _says(session: Session, name: str, policy: Any, rows: Rows) -> Float[Tensor, "b t"]:
    """Log-probabilities under the weights of that name."""
    most = session.policy.rows_per_call
    assert most is not None  # the session chose it
    with session.policies.using(name):
        chunks = torch.arange(len(rows.prompt), device=rows.prompt.device).split(most)
        said = [session.algorithm.likelihood.evaluate(policy, take(rows, i)).logp for i in chunks]
    return torch.cat(said)
