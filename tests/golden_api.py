"""A thin, frozen face of the mathematics, for acceptance: it calls the product's code, whatever the
names inside become. Shapes: n samples, k decision points, r rewards, `*d` the latent's dims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.credit.advantages import Context, Estimator, Standardize, Transform
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.matching import weighting as published_weighting
from flowrl.likelihoods.rows import Evaluation, MatchingRows, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor
from flowrl.losses.preference import CentredReward, GroupPreference, Preference
from flowrl.losses.ratio import clipped_surrogate
from flowrl.losses.regression import NFT
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_sample import WholeSample
from rewards import Scores
from samplers import (
    CPS,
    DDIM,
    Columns,
    ConstantSDE,
    FlowSDE,
    Gaussian,
    Kernel,
    RewardDrift,
    WanSDE,
)
from samplers import mean_log_prob as product_density
from tests.support.golden_estimators import estimator
from tests.support.golden_tokens import token_loss

__all__ = [
    "clipped", "crd", "dgpo", "diffusion_dpo", "estimator", "euphonium_step", "group_advantage",
    "log_density", "matching_logp", "nft", "pipeline_sample", "ratio_norm", "step", "token_loss",
    "tree_credit",
]  # fmt: skip


def step(  # noqa: PLR0913
    kernel: str, x: Tensor, v: Tensor, sigma: float | Tensor, sigma_next: float | Tensor, *,
    eta: float | None = None, noise_level: float | None = None, sigma_max: float | None = None,
    alphas: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean [n *d], std [n]) of one step.

    eta         also `noise_level`: the kernel's noise, its own default if neither is given
    sigma_max   wan: the schedule's second level
    alphas      ddim: the table of cumulative alphas, with `sigma` and `sigma_next` its integer
                timesteps (below 0 is 0), or the two cumulative alphas of the step alone. `x` and
                `v` are then the diffusion model's state and epsilon, and the answer is its kind.
                Without it, a flow's state, velocity and levels.
    """
    eta = noise_level if eta is None else eta
    noisy = {} if eta is None else {"eta": float(eta)}
    known: dict[str, Kernel] = {
        "flow_sde": FlowSDE(**noisy),
        "constant_sde": ConstantSDE(**noisy),
        "cps": CPS(**noisy),
        "ddim": DDIM(**noisy),
        "wan": WanSDE(None if sigma_max is None else float(sigma_max)),
    }
    if alphas is not None:
        assert kernel == "ddim", "only ddim reads alphas"
        return _diffusion_step(known["ddim"], x, v, (sigma, sigma_next), alphas)
    at, to = (torch.as_tensor(s, dtype=x.dtype).expand(len(x)) for s in (sigma, sigma_next))
    return tuple(known[kernel](x, v, at, to))  # type: ignore[return-value]


def _diffusion_step(
    kernel: Kernel, x: Tensor, epsilon: Tensor, times: tuple[float | Tensor, ...], alphas: Tensor
) -> tuple[Tensor, Tensor]:
    """A diffusion state is (alpha + sigma) times a flow's, whose level is sigma / (the same)."""
    table = torch.as_tensor(alphas).double()
    if len(table) == 2:
        both = [a.expand(len(x)) for a in table]
    else:
        both = [table[torch.as_tensor(t).long().clamp(min=0)].expand(len(x)) for t in times]
    signal, signal_to = (a.sqrt() for a in both)
    noise, noise_to = ((1 - a).sqrt() for a in both)
    shape = (-1, *[1] * (x.ndim - 1))
    x0 = (x - noise.view(shape) * epsilon) / signal.view(shape)
    size, size_to = signal + noise, signal_to + noise_to
    g = kernel(x / size.view(shape), epsilon - x0, noise / size, noise_to / size_to)
    return (g.mean * size_to.view(shape)).to(x.dtype), (g.std * size_to).to(x.dtype)


def _per_sample(std: float | Tensor, x: Tensor) -> Tensor:
    """A number, or one a sample in any shape, as [n]."""
    return torch.as_tensor(std).to(x.dtype).reshape(-1).expand(len(x))


def log_density(mean: Tensor, std: float | Tensor, x_next: Tensor) -> Tensor:
    """[n]: mean over the latent's dims."""
    return product_density(Gaussian(mean, _per_sample(std, x_next)), x_next)


def _credit(
    transforms: tuple[Transform, ...], scores: Scores, nodes: tuple[int, ...], weights: Tensor
) -> Tensor:
    ones = (1.0,) * len(nodes)
    columns = Columns(nodes, (True,) * len(nodes), ones, ones)
    return Estimator(transforms)(scores, Context(columns, weights))[0]


def _scores(rewards: Tensor) -> Scores:
    """[n] or [n r]; NaN is unscored."""
    values = rewards[:, None] if rewards.ndim == 1 else rewards
    scored = ~values.isnan()
    return Scores(values.nan_to_num(0.0), scored, tuple(map(str, range(values.shape[1]))))


def group_advantage(
    rewards: Tensor, group_size: int, scale: str = "group", correction: int = 0, eps: float = 1e-4
) -> Tensor:
    """[n], groups contiguous; `scale` in group | batch | none."""
    rule = Standardize(None if scale == "none" else scale, correction, float(eps))  # type: ignore[arg-type]
    return _credit((rule,), _scores(rewards), (int(group_size),), torch.ones(1))[:, 0]


def tree_credit(
    leaf_rewards: Tensor, nodes: tuple[int, ...], correction: int = 1, eps: float = 1e-8
) -> Tensor:
    """[n k]: a leaf's row has the advantages of the nodes on its path. `nodes` has the nodes a tree
    by level; the leaves of each tree are contiguous, in depth-first order."""
    rule = Standardize(correction=correction, eps=float(eps))
    return _credit((rule,), _scores(leaf_rewards), tuple(map(int, nodes)), torch.ones(1))


@dataclass(frozen=True)
class _Given:
    """A kernel whose mean is the velocity itself, and whose std is given."""

    std: Tensor

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        return Gaussian(v, self.std)

    def bound(self, sigmas: object) -> "_Given":
        return self


def ratio_norm(mean_new: Tensor, mean_old: Tensor, x_next: Tensor, std: float | Tensor) -> Tensor:
    """[n]: GRPO-Guard's ratio (not its log), each sample's own."""
    n = len(x_next)
    level = torch.zeros(n, dtype=x_next.dtype)
    rows = TransitionRows(
        torch.zeros(n, dtype=torch.long), level[:, None], torch.ones(n, 1, dtype=torch.bool), None,
        x_next, x_next, level, level, _Given(_per_sample(std, x_next)),
    )  # fmt: skip
    likelihood = Transition("ratio_norm")
    new, old = (
        likelihood.evaluate(lambda x, s, p, mean=m: mean, rows) for m in (mean_new, mean_old)
    )
    return likelihood.log_ratio(new, old, rows).exp()[:, 0]


def _matching_rows(
    x: Tensor, x0: Tensor, noise: Tensor, sigma: Tensor, advantage: Tensor
) -> MatchingRows:
    n = len(x0)
    index, mask = torch.zeros(n, dtype=torch.long), torch.ones(n, 1, dtype=torch.bool)
    return MatchingRows(index, advantage[:, None], mask, None, x, sigma, x0, noise)


def _says(likelihood: Matching, v: Tensor, rows: MatchingRows) -> Evaluation:
    return likelihood.evaluate(lambda x, sigma, prompt: v, rows)


def matching_logp(
    v: Tensor, noise: Tensor, x0: Tensor, sigma: Tensor, weighting: str, power: float = 0.25
) -> Tensor:
    """[n]; `weighting` in uniform | t | t2 (or t**2) | huber | ghuber (its `power`) | epsilon."""
    name = weighting.lower().replace("**", "")
    likelihood = Matching(weight=published_weighting(name, float(power)))  # type: ignore[arg-type]
    return _says(likelihood, v, _matching_rows(x0, x0, noise, sigma, sigma)).logp[:, 0]


def clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """The mean of PPO's clipped surrogate loss."""
    return clipped_surrogate(log_ratio[:, None], advantage[:, None], float(low), float(high)).mean()


def nft(  # noqa: PLR0913
    v: Tensor, v_old: Tensor, v_ref: Tensor | None, x: Tensor, x0: Tensor, noise: Tensor,
    sigma: Tensor, advantage: Tensor, beta: float, advantage_max: float = 5.0, kl: float = 0.0,
    mode: str = "all",
) -> Tensor:  # fmt: skip
    """The mean DiffusionNFT loss, with kl |v - v_ref|^2; advantages are cut to +-advantage_max."""
    likelihood, rows = Matching(), _matching_rows(x, x0, noise, sigma, advantage)
    says = {"new": _says(likelihood, v, rows), "old": _says(likelihood, v_old, rows)}
    if kl and v_ref is not None:
        says["ref"] = _says(likelihood, v_ref, rows)
    anchors = (Anchor(float(kl)),) if kl else ()
    loss = NFT(float(beta), float(advantage_max), mode, anchors)  # type: ignore[arg-type]
    return loss(likelihood, says, rows).value.mean()


def diffusion_dpo(
    v_w: Tensor, v_l: Tensor, ref_w: Tensor, ref_l: Tensor, target_w: Tensor, target_l: Tensor,
    beta: float,
) -> Tensor:  # fmt: skip
    """The mean Diffusion-DPO loss over pairs; predictions and targets of one kind, [n *d] each."""

    def pairs(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], 1).flatten(0, 1)

    target = pairs(target_w, target_l)
    level = torch.zeros(len(target), dtype=target.dtype)
    rows = _matching_rows(target, torch.zeros_like(target), target, level, level)
    likelihood = Matching(paired=True)
    new, ref = (_says(likelihood, pairs(*both), rows) for both in ((v_w, v_l), (ref_w, ref_l)))
    return Preference(beta / 2)(likelihood, {"new": new, "ref": ref}, rows).value.mean()


def dgpo(  # noqa: PLR0913
    v: Tensor, v_old: Tensor, v_ref: Tensor, x0: Tensor, noise: Tensor, advantage: Tensor,
    group_size: int, beta: float, clip: float, kl: float = 0.0, clip_kl: bool = False,
    clip_dsm: bool = True, average_as_reference: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """DGPO, groups contiguous: `dsm` [n], the errors (detached where clipped), `ratio` [n],
    `policy_loss` and `loss`, which adds kl |v - v_ref|^2."""
    level = torch.zeros(len(v), dtype=v.dtype)
    rows = _matching_rows(x0, x0, noise, level, advantage)
    likelihood = Matching(together=int(group_size), same_noise=True)
    given = {"new": v, "slow": v_old, "ref": v_ref}
    says = {role: _says(likelihood, each, rows) for role, each in given.items()}
    loss = GroupPreference(
        int(group_size), float(beta), float(clip), float(kl), clip_kl,
        reference="slow" if average_as_reference else "ref", clip_error=clip_dsm,
    )  # fmt: skip
    entries, errors = loss(likelihood, says, rows), loss.errors(says, rows)
    parts = {"dsm": errors[:, 0], "ratio": entries.metrics["ratio_slow"][:, 0]}
    own = {"policy_loss": entries.metrics["policy_loss"].mean(), "loss": entries.value.mean()}
    return parts | own


def crd(  # noqa: PLR0913
    v: Tensor, v_old: Tensor, v_ref: Tensor, v_target: Tensor, advantage: Tensor, beta: float,
    kl: float, temperature: float | None = None, kind: str = "mse", adaptive: bool = True,
    reward_adaptive_kl: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """CRD with all rows as one group: implicit rewards `r` [n], `policy_loss` and `loss`, which
    adds the divergence from `v_ref`. A temperature of 0 is the code's hard choice, and one below 0
    is None, as in the code."""
    temperature = None if temperature is None or temperature < 0 else float(temperature)
    level = torch.zeros(len(v), dtype=v.dtype)
    rows = _matching_rows(v_target, torch.zeros_like(v_target), v_target, level, advantage)
    likelihood = Matching(together=len(v))
    given = {"new": v, "slow": v_old, "ref": v_ref}
    says = {role: _says(likelihood, each, rows) for role, each in given.items()}
    loss = CentredReward(
        len(v), float(beta), float(kl), temperature, kind, adaptive, reward_adaptive_kl  # type: ignore[arg-type]
    )  # fmt: skip
    entries = loss(likelihood, says, rows)
    own = {"policy_loss": entries.metrics["policy_loss"].mean(), "loss": entries.value.mean()}
    return {"r": loss.implicit(says, v_target)[:, 0], **own}


def euphonium_step(  # noqa: PLR0913
    x: Tensor, v: Tensor, sigma: float | Tensor, sigma_next: float | Tensor, eta: float,
    reward_grad: Tensor, scale: float = 0.1, kl_beta: float = 0.1,
    normalise: Literal["batch", "sample"] | None = "batch", by_dsigma: bool = False,
    guided_logprob: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Euphonium's step: `mean` [n *d] of the sampled step, `scored_mean` [n *d], `std` [n].

    scale      below 0 is eta^2 / (2 kl_beta)
    normalise  divides the gradient by its norm: of each sample, or of the whole batch, which is one
               sample for the product
    """
    at, to = (torch.as_tensor(s, dtype=x.dtype).expand(len(x)) for s in (sigma, sigma_next))
    strength = None if scale < 0 else float(scale)
    drift = RewardDrift(strength, float(kl_beta), normalise is not None, by_dsigma)
    plain = ConstantSDE(float(eta))(x, v, at, to)
    gradient = reward_grad
    if normalise == "batch":
        gradient = drift.direction(reward_grad[None])[0]
        drift = replace(drift, normalised=False)
    guided = drift(plain, gradient, at, to)
    scored = guided if guided_logprob else plain
    return {"mean": guided.mean, "scored_mean": scored.mean, "std": guided.std}


def pipeline_sample(
    pipe: Any, prompts: Sequence[str], *, steps: int, guidance: float | None,
    negative_prompts: Sequence[str] | None = None, call: Mapping[str, Any] | None = None,
    seed: int = 0, scheduler: Literal["own", "flowrl"] = "own",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(initial latents, media): a sample a prompt, made with flowrl's velocities.

    The latents are what the pipeline's own argument `latents` takes, so that the media [n 3 h w] or
    [n f 3 h w] in 0..1 compare with `pipe(prompts, latents=latents, output_type="pt", ...)`.

    scheduler   own: the pipeline's scheduler steps; one that draws noise takes a
                `torch.Generator().manual_seed(seed)`. flowrl: Euler steps down flowrl's levels
    """
    policy = PipelinePolicy(pipe, call=call or {})
    meta = [{"negative_prompt": text} for text in negative_prompts or ()]
    made = WholeSample(policy, policy.open(prompts, meta, steps), seed, guidance)
    return made.latents, made.media(made.stepped() if scheduler == "own" else made.flowrl())
