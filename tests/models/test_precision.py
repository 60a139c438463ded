"""Half-precision networks: small steps are kept, sums are float32, float16 gradients survive."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flowrl.algorithm import Average, Decay
from flowrl.errors import UserError
from flowrl.iteration import minibatches as assignment
from flowrl.iteration import ratio_check
from flowrl.iteration.tally import Tally
from flowrl.models import precision, savings
from flowrl.models.open import set_kernels
from flowrl.run.save import checkpoint as checkpoints
from flowrl.run.watch.alarms import Alarms
from flowrl.session.learner import EVALUATION, load_policy
from flowrl.session.policies import Policies
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.settings.read import dump, run_from, run_of
from tests.support import iterations, runs, tiny_pipelines_image
from tests.support.iterations import collect, iterate


def session(
    pipeline: Path, folder: Path, dtype: str, lora: dict | None, **train: object
) -> Session:
    tree = runs.tree(pipeline, folder, runs.NFT, **train)
    tree["model"] |= {"dtype": dtype, "lora": lora}
    tree["evaluate"]["average"] = 0.5
    return runs.opened(tree, folder)


def layer() -> tuple[nn.Linear, Policies]:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(module.weight, 1.0)
    averages = (Average("slow", Decay(start=0.5)),)
    return module, Policies(dict(module.named_parameters()), averages)


def test_steps_that_half_precision_would_lose_add_up():
    module, kept = layer()
    optimizer = torch.optim.SGD(kept.parameters.values(), lr=1e-4)
    x, moved = torch.ones(1, 1, dtype=torch.bfloat16), []
    for step in range(100):
        module(x).sum().backward()  # a gradient of 1
        optimizer.step()
        kept.publish()
        kept.follow(step + 1)
        optimizer.zero_grad()
        moved.append(module.weight.item())
    assert kept.parameters["weight"].item() == pytest.approx(1 - 100 * 1e-4, abs=1e-5)
    assert moved[0] == 1.0  # one step alone is below bfloat16's digits
    assert moved[-1] == torch.tensor(0.99).bfloat16().item()
    slow = kept.state()["slow/weight"]  # the average is behind by the step, and float32
    assert slow.item() == pytest.approx(0.99 + 1e-4, abs=1e-5) and slow.dtype == torch.float32
    with kept.using("ref"):
        assert module.weight.item() == 1.0
    with kept.using("slow"):
        assert module.weight.dtype == torch.bfloat16
    assert module.weight.item() == moved[-1]


def test_gradients_of_chunks_are_summed_in_float32():
    module, kept = layer()
    for value in (1.0, 2**-10, 2**-10):  # bfloat16 has 8 digits
        module(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert kept.parameters["weight"].grad.item() == 1 + 2**-9
    assert module.weight.grad is None


def test_gradients_move_to_masters_together_and_in_parts(monkeypatch):
    """One operation for many, which changes no bit; a bound in bytes makes several of them."""
    torch.manual_seed(0)
    x = torch.randn(3, 5).bfloat16()
    found, calls = [], []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: [calls.append(len(a[0])), copy(*a)])
    for most in (2**26, 60):
        monkeypatch.setattr(precision, "MOST", most)
        torch.manual_seed(1)
        layers = nn.Sequential(*(nn.Linear(5, 5, dtype=torch.bfloat16) for _ in range(4)))
        kept = Policies(dict(layers.named_parameters()))
        halves: list[list[torch.Tensor]] = []
        for _ in range(2):
            layers(x).square().sum().backward()
            grads = torch.autograd.grad(layers(x).square().sum(), list(layers.parameters()))
            halves.append([grad.float() for grad in grads])
        masters = list(kept.parameters.values())
        for master, *each in zip(masters, *halves, strict=True):
            assert torch.equal(master.grad, each[0] + each[1])
        found.append([master.grad for master in masters])
        assert all(p.grad is None for p in layers.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert calls[:2] == [8, 8] and len(calls) > 4 and sum(calls) == 32


def test_gradients_of_a_pass_that_failed_are_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError("out of memory")

    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    kept, x = Policies(dict(module.named_parameters())), torch.ones(1, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="out of memory"):
        module(Fails.apply(x.requires_grad_())).sum().backward()
    assert kept.gradients.waiting
    kept.forget_gradients()
    module(x).sum().backward()
    assert kept.parameters["bias"].grad.tolist() == [1, 1]


def test_a_nested_backward_pass_loses_no_gradient():
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    kept, x = Policies(dict(module.named_parameters())), torch.ones(1, 2, dtype=torch.bfloat16)
    inner = checkpoint(module, x.requires_grad_(), use_reentrant=True)
    module(inner).sum().backward()
    weight, bias = module.weight.detach().float(), kept.parameters["bias"].grad
    assert torch.equal(bias, 1 + weight.sum(0).bfloat16().float())


@pytest.mark.slow
def test_a_run_of_half_weights_keeps_masters_and_resumes_to_the_bit(pipeline, tmp_path):
    """At a learning rate at which bfloat16 weights would stand still."""

    def opened() -> Session:
        return session(pipeline, tmp_path, "bfloat16", None, lr=1e-6)

    kept, progress = opened(), Progress()
    start = {name: p.detach().clone() for name, p in kept.learner.policies.parameters.items()}
    iterate(kept, progress)
    checkpoints.save_checkpoint(kept, progress, Alarms())
    iterate(kept, progress)
    masters, network = kept.learner.policies.parameters, kept.learner.policies.network
    assert {p.dtype for p in masters.values()} == {torch.float32}
    assert {p.dtype for p in network.values()} == {torch.bfloat16}
    steps = torch.cat([(masters[name] - start[name]).flatten() for name in start])
    assert 1e-6 < steps.abs().max() < 4e-6
    assert all(torch.equal(network[name], masters[name].bfloat16()) for name in masters)

    again, alarms = opened(), Alarms()
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    iterate(again, checkpoints.restore(again, newest, alarms))
    whole, resumed = kept.learner.policies.state(), again.learner.policies.state()
    assert whole.keys() == resumed.keys() and f"{EVALUATION}/{next(iter(masters))}" in whole
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(torch.equal(network[n], again.learner.policies.network[n]) for n in network)


@pytest.mark.quick_cases("grpo")
@pytest.mark.parametrize("recipe", [runs.FLOW_GRPO, runs.NFT], ids=["grpo", "nft"])
def test_adapters_compute_in_bfloat16_and_step_in_float32(pipeline, tmp_path, recipe):
    tree = runs.tree(pipeline, tmp_path, recipe, lr=1e-5)
    tree["model"] |= {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8, "dtype": "bfloat16"}}
    kept, progress = runs.opened(tree, tmp_path), Progress()
    policies = kept.learner.policies
    assert {p.dtype for p in policies.network.values()} == {torch.bfloat16}
    assert {p.dtype for p in policies.parameters.values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in policies.parameters.items()}
    metrics = iterate(kept, progress).metrics
    if "ratio" in metrics:
        assert metrics["ratio_max"] == metrics["ratio_min"] == 1
    moved = [name for name, p in policies.parameters.items() if not torch.equal(p, before[name])]
    assert any(".lora_B." in name for name in moved)
    for name, p in policies.network.items():
        assert torch.equal(p, policies.parameters[name].bfloat16())
    half = ["weight", "bias"]
    seen = kept.learner.policy.denoisers[0].named_parameters()
    assert {p.dtype for name, p in seen if name.split(".")[-1] in half} == {torch.bfloat16}


@pytest.mark.quick_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adapters_of_a_bfloat16_model_are_bfloat16_unless_a_run_began_otherwise(
    pipeline, tmp_path, dtype
):
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["model"] |= {"dtype": dtype, "lora": {"rank": 4, "alpha": 8}}
    run = run_from(tree, "test")
    assert run.model.lora is not None and run.model.lora.dtype == "auto"
    assert run.model.half_adapters == (dtype == "bfloat16")
    saved = dump(run)
    for older, wanted in ((False, dtype == "bfloat16"), (True, False)):
        if older:
            del saved["model"]["lora"]["dtype"]  # before it was a setting
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(saved))
        assert run_of(tmp_path, trust=True).model.half_adapters == wanted
    with_lora = load_policy(run, torch.device("cpu")).trainable().values()
    half = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert {p.dtype for p in with_lora} == {half}


def test_bfloat16_adapters_want_a_bfloat16_model(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["model"] |= {"lora": {"rank": 4, "alpha": 8, "dtype": "bfloat16"}}
    with pytest.raises(UserError, match=r"lora\.dtype: bfloat16 adapters of a float32 model"):
        run_from(tree, "test")


@pytest.mark.parametrize(
    "lora",
    [None, pytest.param({"rank": 2, "alpha": 4}, marks=pytest.mark.slow)],
    ids=["full", "lora"],
)
def test_float16_gradients_are_scaled_and_the_scale_is_saved(pipeline, tmp_path, lora):
    kept, progress = session(pipeline, tmp_path, "float16", lora, lr=1e-3), Progress()
    assert {p.dtype for p in kept.learner.policies.parameters.values()} == {torch.float32}
    found: list[float] = []
    experience = collect(kept, 0)
    for scale in (1.0, 2.0**16):
        kept.learner.scaler.load_state_dict(kept.learner.scaler.state_dict() | {"scale": scale})
        for chunk in assignment.share_of(kept.learner, experience, 0, 0):
            entries, mask = iterations.chunk_loss(kept.learner, experience, chunk.rows())
            loss = entries.value[mask].sum() * 1e-7  # as of a mean over large latents
            kept.learner.scaler.scale(loss).backward()
        grads = [p.grad for p in kept.learner.policies.parameters.values() if p.grad is not None]
        found.append(sum(float((g != 0).sum()) for g in grads))
        kept.learner.optimizer.zero_grad()
    assert found[1] > 1.5 * found[0]  # most would have been lost

    overflown = {"scale": 2.0**60}
    kept.learner.scaler.load_state_dict(kept.learner.scaler.state_dict() | overflown)
    before = kept.learner.policies.state()
    metrics = iterate(kept, progress).metrics
    assert metrics["skipped"] == 1 and metrics["loss_scale"] == 2.0**59
    after = kept.learner.policies.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert progress.skipped_in_a_row == 0  # the scale's fault
    kept.learner.scaler.load_state_dict(kept.learner.scaler.state_dict() | {"scale": 2.0**10})
    assert iterate(kept, progress).metrics["skipped"] == 0
    checkpoints.save_checkpoint(kept, progress, Alarms())
    again = session(pipeline, tmp_path, "float16", lora)
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    checkpoints.restore(again, newest, Alarms())
    assert again.learner.scaler.state_dict() == kept.learner.scaler.state_dict()


@pytest.mark.slow
def test_gradients_that_are_not_finite_at_scale_one_still_stop_the_run(pipeline, tmp_path):
    kept, progress = session(pipeline, tmp_path, "float16", {"rank": 2, "alpha": 4}), Progress()
    kept.learner.scaler.scale(torch.zeros(()))
    kept.learner.scaler.load_state_dict(kept.learner.scaler.state_dict() | {"scale": 1.0})
    parameter = next(iter(kept.learner.policies.parameters.values()))
    parameter.register_hook(lambda grad: grad * float("nan"))
    assert iterate(kept, progress).metrics["skipped"] == 1
    assert progress.skipped_in_a_row == 1
    kept.learner.scaler.load_state_dict(kept.learner.scaler.state_dict() | {"scale": 2.0})
    iterate(kept, progress)
    assert progress.skipped_in_a_row == 1  # that one may be the scale's


def test_tf32_and_cudnn_attention_are_set_on_cuda_alone():
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32

    def after(allowed: bool | None, device: str) -> tuple[bool, bool]:
        set_kernels(torch.device(device), tf32=allowed, cudnn_attention=False)
        return matmul.allow_tf32, convolution.allow_tf32

    attends = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        assert after(True, "cpu") == before
        assert torch.backends.cuda.cudnn_sdp_enabled() is attends
        assert after(True, "cuda") == (True, True)
        assert after(None, "cuda") == (True, True)
        assert after(False, "cuda") == (False, False)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        set_kernels(torch.device("cuda"), tf32=None, cudnn_attention=True)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attends)
        matmul.allow_tf32, convolution.allow_tf32 = before


def test_cudnn_attention_may_be_left_out_of_calls_with_a_mask_alone(monkeypatch):
    attends, q = torch.backends.cuda.cudnn_sdp_enabled(), torch.randn(1, 2, 4, 8)
    mask, seen = torch.ones(4, 4, dtype=torch.bool).tril(), list[bool]()

    def real(*args, **named):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **named)

    plain = savings.PLAIN_ATTENTION
    monkeypatch.setattr(savings, "PLAIN_ATTENTION", real)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", plain)  # restores it
    try:
        savings.cudnn_attention("unmasked")
        attention = functional.scaled_dot_product_attention
        for out, wanted in (
            (attention(q, q, q), plain(q, q, q)),
            (attention(q, q, q, is_causal=True), plain(q, q, q, is_causal=True)),
            (attention(q, q, q, attn_mask=mask), plain(q, q, q, mask)),
            (attention(q, q, q, mask, 0.0), plain(q, q, q, mask)),
            (attention(query=q, key=q, value=q), plain(q, q, q)),
            (attention(q[:, :, :1], q, q), plain(q[:, :, :1], q, q)),
        ):
            assert torch.equal(out, wanted)
        assert seen == [True, True, False, False, True, False]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="backend"):
            attention(q, q, q, mask)  # asked for alone, it stays: and a CPU lacks it
        assert seen[-1]
        with sdpa_kernel(SDPBackend.MATH):  # the caller's choice stays
            attention(q, q, q, mask)
            assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        savings.cudnn_attention(False)
        assert functional.scaled_dot_product_attention is real
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attends)


CUDNN = {  # by `model.cudnn_attention` and `model.attention`
    "true": (True, None),
    "unmasked": ("unmasked", None),
    "diffusers' own": (False, "_native_cudnn"),
    "off": (False, None),
}


@pytest.mark.parametrize("name", CUDNN)
def test_gradients_of_attention_come_in_one_layout_where_cudnn_may_compute_them(name, monkeypatch):
    """torch 2.11 keeps cuDNN's backward pass by the layout of q, k and v, and reads each gradient
    of the output by the layout of the first. A single block of FLUX.1 returns a part of a wider
    tensor; without cuDNN it may."""
    use, backend = CUDNN[name]
    attends, plain = torch.backends.cuda.cudnn_sdp_enabled(), savings.PLAIN_ATTENTION
    network = tiny_pipelines_image.flux().transformer
    layouts = set[tuple[int, ...]]()

    def real(*args, **named):
        with sdpa_kernel(SDPBackend.MATH):
            out = plain(*args, **named)
        out.register_hook(lambda grad: layouts.add(grad.stride()))
        return out

    monkeypatch.setattr(savings, "PLAIN_ATTENTION", real)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", real)  # restores it
    config = network.config
    channels, width = config.in_channels, config.joint_attention_dim
    hidden = torch.randn(2, 16, channels, requires_grad=True)
    try:
        savings.cudnn_attention(use)
        if backend:
            monkeypatch.setattr(type(network), "set_attention_backend", lambda *_: None)
            savings.attention([network], backend)  # the backend itself is CUDA's alone
        out = network(
            hidden, torch.randn(2, 16, width), torch.randn(2, config.pooled_projection_dim),
            torch.ones(2), torch.zeros(16, 3), torch.zeros(16, 3), torch.ones(2), return_dict=False,
        )[0]  # fmt: skip
        out.square().sum().backward()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attends)
    assert len(layouts) == (2 if name == "off" else 1)
    assert hidden.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.slow
def test_bfloat16_adapters_start_at_ratio_one_with_float32_gradients_to_rounding(
    pipeline, tmp_path, capsys
):
    """The gradients of one update, of adapters that add something, beside float32 adapters'."""
    found, floors = [], []
    for dtype in ("float32", "bfloat16"):
        recipe = runs.FLOW_GRPO | {"kl": 0.01}
        tree = runs.tree(pipeline, tmp_path, recipe, recompute_old=False)
        tree["model"] |= {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8, "dtype": dtype}}
        kept = runs.opened(tree, tmp_path)
        draws = torch.Generator().manual_seed(1)
        for name, p in kept.learner.policies.parameters.items():
            assert p.dtype == torch.float32
            if ".lora_B." in name:
                p.data = 0.1 * torch.randn(p.shape, generator=draws)
        kept.learner.policies.publish()
        experience = collect(kept, 0)
        floors.append(ratio_check.check_ratio(kept.learner, experience, kept.terminal))
        for share in assignment.shares_of(kept.learner, experience, 0):
            iterations.add_gradients(kept.learner, experience, share, None, Tally(), None)
        grads = [p.grad for p in kept.learner.policies.parameters.values()]
        found.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
    assert max(floors) < 0.01, floors
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.05  # 0.024 seen
    assert "stored log-densities recomputed" in capsys.readouterr().out
