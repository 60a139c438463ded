"""Models of one's own: their checks at load, and laws of the flow of points."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flowrl
from examples.own.points import Points
from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.own.policy import OwnPolicy
from samplers import Chain, FlowSDE, Ode
from samplers.adapt import flow_velocity, level, to_vp
from tests.support.advice import advice

PROMPTS = ["a point", "a point on the right"]


class Good(nn.Module):
    """A small flow, of which each refused model below changes one member."""

    state = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def encode(self, prompts, rows):
        return torch.tensor([[float(len(p))] for p in prompts])

    def forward(self, x, sigma, encoded):
        return self.linear(x) * sigma[:, None] + encoded.to(x) / 10


class Dropped(Good):
    def forward(self, x, sigma, encoded):
        return super().forward(x, sigma, encoded) + torch.rand_like(x)


class Summed(Good):
    def forward(self, x, sigma, encoded):
        return super().forward(x, sigma, encoded) + x.mean(0)


class Short(Good):
    def forward(self, x, sigma, encoded):
        return self.linear(x)[:, :2]


class Infinite(Good):
    def forward(self, x, sigma, encoded):
        return self.linear(x) / (encoded.to(x) - 7)


class Detached(Good):
    def forward(self, x, sigma, encoded):
        return super().forward(x, sigma, encoded).detach()


class Turned(Good):
    def forward(self, x, sigma, encoded):
        return -x + 0 * self.linear(x)


class Typed(Good):
    def forward(self, x, sigma, encoded):
        return self.linear(x.double())


class Ranked(Good):
    def encode(self, prompts, rows):
        return torch.arange(float(len(prompts)))[:, None]


class OneRow(Good):
    def encode(self, prompts, rows):
        return torch.zeros(1, 1)


class Shaped(Good):
    state = 3  # type: ignore[assignment]


class Deep(Good):
    def decode(self, x0, encoded):
        return x0[:, None, None].expand(-1, 2, 2, 3)


class Elsewhere(Good):
    trained = ("network",)


class Noisy(Good):
    prediction = "epsilon"


class Diffusing(Good):
    alphas_cumprod = (0.9, 0.5, 0.1)


class Rising(Good):
    prediction = "sample"
    alphas_cumprod = (0.1, 0.5)


REFUSED = {
    Dropped: "two identical calls differ",
    Summed: "rows must not depend on one another",
    Short: r"expected a prediction with the states' shape \[3, 3\], not \[3, 2\]",
    Infinite: "numbers that are not finite",
    Detached: "no gradient with respect to the trained weights",
    Turned: "return minus its velocity",
    Typed: r"Typed.forward raised RuntimeError: mat1 .*test_own.py, line \d+\)",
    Ranked: "Ranked.encode: a row alone and in a batch of three differs",
    OneRow: "one row for each of 3 prompts, not",
    Shaped: r"state must be the shape of one state, such as \(2,\), not 3",
    Deep: r"its samples: .* not a tensor of shape \[2, 2, 3\]",
    Elsewhere: "trained: .*network",
    Noisy: "start lower",
    Diffusing: "belongs to the predictions",
    Rising: "alphas_cumprod must be a list that decreases",
    nn.Identity: "with state, encode",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_model_that_cannot_be_trained_is_refused(kind):
    with pytest.raises(UserError, match=REFUSED[kind]):
        OwnPolicy(kind()).proofs(["a", "bcdefgh"], 4)


class Falling(Good):
    """A published flow: from noise at t = 0 to samples at t = 1."""

    def velocity(self, x, t):
        return x + 0 * self.linear(x)  # x0 - noise grows with the noise's part of it, in its sign

    def forward(self, x, sigma, encoded):
        return -self.velocity(x, 1 - sigma)


class Mended(Falling):
    def forward(self, x, sigma, encoded):
        return -super().forward(x, sigma, encoded)


class Ragged(Good):
    """Texts of their own lengths, padded to the longest of the call."""

    longest = 0

    def encode(self, prompts, rows):
        width = self.longest or max(map(len, prompts))
        return torch.tensor([[1.0] * len(p) + [0.0] * (width - len(p)) for p in prompts])

    def forward(self, x, sigma, encoded):
        return super().forward(x, sigma, encoded.sum(1, keepdim=True))


class Padded(Ragged):
    longest = 16


class Sampled(Good):
    prediction = "sample"


class Preserving(Good):
    prediction = "v_prediction"


class PreservingLevels(Preserving):
    alphas_cumprod = (0.9, 0.5, 0.1)


class NoisyLevels(Noisy):
    alphas_cumprod = (0.9, 0.5, 0.1)

    def forward(self, x, sigma, encoded):
        return x + 0 * self.linear(x)


def proofs(kind: type[Good], **more: Any) -> list[str]:
    return OwnPolicy(kind(), **more).proofs(["a", "bcdefgh"], 3)


def test_a_refused_model_passes_after_what_the_sentence_says() -> None:
    advice(
        "its velocity falls as the noise grows (slope {}), while noise - x0 grows with it (slope "
        "1): for a flow from noise to samples, return minus its velocity at t = 1 - sigma",
        lambda: proofs(Falling),
        lambda: proofs(Mended),
    )
    advice(
        ".encode: {} for {} prompts, but {} for one: pad prompts to one length",
        lambda: proofs(Ragged),
        lambda: proofs(Padded),
    )
    advice(
        "it predicts the noise, but starts at pure noise, where this does not determine the "
        "sample: predict sample or velocity, or start lower (model.sigmas for a flow, "
        "alphas_cumprod above 0 for a diffusion)",
        lambda: proofs(Noisy),
        lambda: [proofs(Sampled), proofs(Good), proofs(NoisyLevels)],
    )
    advice(
        "v_prediction is alpha noise - s x0 of a variance-preserving process: add alphas_cumprod, "
        "or predict the velocity noise - x0",
        lambda: proofs(Preserving),
        lambda: [proofs(PreservingLevels), proofs(Good)],
    )


def test_adapters_and_whole_weights_of_a_module(tmp_path: Path) -> None:
    def adapted() -> OwnPolicy:
        made = OwnPolicy(Good())
        made.add_lora(rank=2, alpha=4, targets=None, seed=0)
        return made

    def whole() -> OwnPolicy:
        made = OwnPolicy(Good())
        made.load_weights(tmp_path)
        made.add_lora(rank=2, alpha=4, targets=None, seed=0)
        return made

    made, plain = adapted(), OwnPolicy(Good())
    plain.train_all()
    plain.save(tmp_path)
    advice(
        "the model already has adapters: call add_lora once, on a model without any",
        lambda: made.add_lora(rank=2, alpha=4, targets=None, seed=0),
        adapted,
    )


def test_a_sound_model_passes_with_a_sentence():
    (sentence,) = OwnPolicy(Good()).proofs(["a", "bc"], 4)
    assert sentence.startswith(
        "Good: 1.2e-05 million weights, predicts velocity at states [3]; sam"
    )


class Checkpointed(Good):
    def forward(self, x, sigma, encoded):
        moved: Any = checkpoint(self.linear, x, use_reentrant=False)
        return moved * sigma[:, None] + encoded.to(x) / 10


class Convolved(Good):
    """It has no linear layer that adapters could be added to."""

    state = (1, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, sigma, encoded):
        return self.linear(x) * sigma[:, None, None, None]

    def decode(self, x0, encoded):
        return x0.expand(-1, 3, -1, -1)


class Diffusion(Diffusing):
    prediction = "sample"


class TwoParts(Good):
    """Only its first part, `linear`, gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(3, 3)

    def forward(self, x, sigma, encoded):
        return super().forward(x, sigma, encoded) + self.still(x).detach()


class Stilled(TwoParts):
    trained = ("still",)


class Moved(TwoParts):
    trained = ("linear",)


def proven(policy: OwnPolicy) -> list[str]:
    return policy.proofs(["a", "bcdefgh"], 2)


def test_what_is_said_of_a_model_makes_it_one_that_trains():
    for refused, followed in ((Detached, Good), (Stilled, Moved)):
        advice(
            "{}.forward: its prediction has no gradient with respect to the trained weights: "
            "remove torch.no_grad or detach, or name other modules in `trained`",
            lambda refused=refused: proven(OwnPolicy(refused())),
            lambda followed=followed: proven(OwnPolicy(followed())),
        )
    for followed in (Diffusion, Good):
        advice(
            "{}: alphas_cumprod belongs to the predictions epsilon, v_prediction and sample: add "
            "`prediction`, or leave alphas_cumprod out",
            lambda: OwnPolicy(Diffusing()),
            lambda followed=followed: proven(OwnPolicy(followed())),
        )
    advice(
        "model.sigmas: the levels of {} come from its alphas_cumprod: leave it out",
        lambda: OwnPolicy(Diffusion(), levels=lambda steps: [0.9] * steps),
        lambda: proven(OwnPolicy(Diffusion())),
    )


def test_what_is_said_of_a_setting_trains_the_model_without_it():
    def adapted(model: nn.Module) -> list[str]:
        policy = OwnPolicy(model)
        policy.add_lora(rank=2, alpha=2, targets=None, seed=0)
        return proven(policy)

    def whole(model: nn.Module) -> list[str]:
        policy = OwnPolicy(model)
        policy.train_all()
        assert all(p.requires_grad for p in policy.trainable().values())
        return proven(policy)

    advice(
        "model.lora: the trained modules have no such linear layer, which adapters need: set "
        "model.lora: null (lora=False in Python) to train all weights",
        lambda: adapted(Convolved()),
        lambda: whole(Convolved()),
    )
    advice(
        "train.gradient_checkpointing: {} is your own model: call torch.utils.checkpoint in its "
        "forward, and leave the setting out",
        lambda: OwnPolicy(Good()).checkpoint_gradients(),
        lambda: whole(Checkpointed()),
    )
    for scale in (None, "none", 1.0):
        advice(
            "guidance {}: {} is your own model, which can only apply guidance in its forward: "
            "leave guidance out",
            lambda: OwnPolicy(Good()).guided(4.0, None),
            lambda scale=scale: proven(OwnPolicy(Good()).guided(scale, scale)),
        )


class Encoder(Good):
    """Encodings of several tensors, a frozen part and a trained one."""

    trained = ("network",)

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))

    def encode(self, prompts, rows):
        return {"length": super().encode(prompts, rows), "one": torch.ones(len(prompts), 1)}

    def forward(self, x, sigma, encoded):
        return self.network(x) + self.linear(x) * encoded["one"].to(x)


def test_only_the_named_modules_are_trained():
    whole = OwnPolicy(Encoder())
    whole.train_all()
    assert set(whole.trainable()) == {
        f"network.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")
    }
    assert not whole.model.linear.weight.requires_grad
    policy = OwnPolicy(Encoder())
    policy.add_lora(rank=2, alpha=4, targets=["0"], seed=0)
    assert set(policy.trainable()) == {f"network.0.lora_{x}.default.weight" for x in "AB"}
    assert policy.proofs(["a", "bc"], 4)
    with pytest.raises(UserError, match="lora target 'q' matches no linear layer"):
        OwnPolicy(Encoder()).add_lora(rank=2, alpha=4, targets=["q"], seed=0)
    with pytest.raises(UserError, match="have no such linear layer"):
        OwnPolicy(Encoder()).add_lora(rank=2, alpha=4, targets=["linear"], seed=0)


def perturbed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


def test_ode_samples_equal_a_plain_loop():
    model = perturbed(Points()).double()
    (made,) = flowrl.sample(model, PROMPTS, plan=Ode(3), steps=5, decode=False)
    (start,) = flowrl.sample(model, PROMPTS, plan=Chain(FlowSDE(0.7), 3), steps=5, decode=False)
    x = first_states(made)
    with torch.no_grad():
        for k in range(5):
            sigma = torch.full((6,), 1 - k / 5, dtype=torch.float64)
            encoded = model.encode([PROMPTS[i] for i in made.prompt.tolist()], [])
            x = x - model(x, sigma, encoded) / 5
    assert torch.allclose(made.x0, x, rtol=0, atol=1e-12)
    assert not torch.allclose(start.x0, x, atol=1e-3)


def first_states(made: flowrl.SampledPlan) -> torch.Tensor:
    """The noise that samples of an ODE begin from: a model whose velocity is 0 keeps it."""

    class Still(Points):
        def forward(self, x, sigma, encoded):
            return 0 * x

    (kept,) = flowrl.sample(
        Still().double(), PROMPTS, plan=Ode(made.plan.group), steps=5, decode=False
    )
    return kept.x0


def test_the_density_of_an_sde_step_is_the_closed_gaussian():
    """One noisy step, then a deterministic one, from which its end can be read back."""
    model = perturbed(Points()).double()
    (made,) = flowrl.sample(model, PROMPTS, plan=Chain(FlowSDE(0.7), 3), steps=2, decode=False)
    batch = OwnPolicy(model)
    conditioning = batch.encode(PROMPTS)
    velocity = batch.bind(conditioning, steps=2)
    (rollout,) = MediaBatch(batch, conditioning, 2).rollouts(
        Chain(FlowSDE(0.7), 3), range(2), seed=0, iteration=0
    )
    (edge,) = rollout.edges
    with torch.no_grad():
        v = velocity(edge.x, torch.ones(6).double(), edge.prompt)
    # Flow-GRPO, arXiv:2505.05470, eq. 9, from 1 to 1/2 with sigma_t = 0.7 sqrt(t / (1 - t)), where
    # its code takes 1 - t of the second level in place of 0
    g2 = 0.49 * 1.0 / 0.5
    mean = edge.x - 0.5 * v - 0.5 * g2 / 2 * edge.x
    var = g2 * 0.5
    d = (edge.x_next - mean).square() / (2 * var)
    closed = (-d - 0.5 * torch.log(torch.tensor(2 * torch.pi * var).double())).mean(1)
    assert torch.allclose(edge.logp.double(), closed, rtol=0, atol=1e-6)
    assert torch.allclose(made.log_probs[:, 0].double(), closed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("diffused", [True, False], ids=["diffusion", "flow"])
def test_predictions_make_the_velocity_of_the_points(prediction, diffused):
    """The mixture's exact velocity, rewritten as a prediction of noise, x0 or v, samples alike."""
    if not diffused and prediction == "v_prediction":
        return  # refused: see Scheduled.of
    alphas = torch.linspace(0.9999, 1e-4, 1000, dtype=torch.float64)
    levels = level(alphas)

    class Rewritten(Points):
        def forward(self, x, sigma, encoded):
            if diffused:  # times, and states alpha x0 + s noise
                sigma = levels[sigma.long()]
                s = ((1 - sigma) ** 2 + sigma**2).sqrt()[:, None]
                x = x * s
            v = super().forward(x, sigma, encoded)
            x0, noise = x - sigma[:, None] * v, x + (1 - sigma[:, None]) * v
            if prediction == "epsilon":
                return noise
            if prediction == "sample":
                return x0
            return ((1 - sigma[:, None]) * noise - sigma[:, None] * x0) / s

    model = perturbed(Rewritten()).double()
    model.prediction = prediction
    if diffused:
        model.alphas_cumprod = alphas
    policy = OwnPolicy(
        model, levels=None if diffused else lambda n: [0.99 - i / n for i in range(n)]
    )
    encoded = policy.encode(PROMPTS)
    sigmas = policy.schedule(4).sigmas
    x, prompt = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    sigma = torch.tensor(sigmas[:4], dtype=torch.float64)
    with torch.no_grad():
        found = policy.bind(encoded, steps=4)(x, sigma, prompt)
        wanted = Points.forward(model, x, sigma, encoded.take(prompt).encoded)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert policy.proofs(PROMPTS, 4)


def test_flow_velocity_is_the_same_of_both_states():
    """epsilon and x0 are one number in flow states and in variance-preserving ones."""
    x0, noise = torch.randn(2, 5, 2, dtype=torch.float64)
    sigma = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * noise
    for kind, predicted in (("epsilon", noise), ("sample", x0)):
        v = flow_velocity(kind, to_vp(x, sigma), predicted, sigma)
        assert torch.allclose(v, noise - x0, atol=1e-12)


class Heard(Good):
    """Sound: 4 numbers of one channel at 8 kHz."""

    rate = 8000

    def decode(self, x0, encoded):
        return torch.cat([x0, x0[:, :1]], 1) / 4


class HeardBadly(Heard):
    rate = 8000.5


class HeardAsOneNumber(Heard):
    def decode(self, x0, encoded):
        return x0[:, None, None, :]


def test_a_model_with_a_rate_makes_sound() -> None:
    """Rewards, pages and files get waveforms [n channels t] with their rate."""
    policy = OwnPolicy(Heard())
    batch = MediaBatch(policy, policy.encode(PROMPTS), 3)
    (rollout,) = batch.rollouts(Ode(2), [0, 1], seed=0, iteration=0)
    made = batch.media(rollout)
    assert made.sound_alone and made.audio.rate == 8000 and made.media.shape == (4, 1, 4)
    assert policy.form.kind == "sound"
    assert "sound/level" in batch.statistics(rollout, made.media).means
    with pytest.raises(UserError, match=r"rate must be a whole number of Hz above 0"):
        OwnPolicy(HeardBadly())
    bad = OwnPolicy(HeardAsOneNumber())
    with pytest.raises(UserError, match=r"a model with a `rate` makes sound: expected waveforms"):
        bad.decode(torch.zeros(2, 3), bad.encode(PROMPTS), steps=3)
