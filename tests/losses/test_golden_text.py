"""Token losses and estimators of language models against arrays that the originals produced."""

import pytest
import torch
from torch import Tensor

from flowrl.likelihoods.token_ratios import bounded, mismatch
from flowrl.losses.weights import Mismatch
from tests import golden_api as api
from tests.support.golden_tools import arrays, cases, close

TRL = "mm_trl_grpo_loss_1_16_0"
FLAGS = {"case", "loss_type", "onpolicy", "isr", "use_samp", "tool", "adv2d", "dropped"}


@pytest.mark.parametrize("case", cases(TRL))
def test_trls_losses_and_gradients(case):
    """58 cases of TRL 1.16.0: eight losses, two levels, and every correction, mask and bonus."""
    z, given = arrays(TRL), cases(TRL)[case]
    settings = {k: v for k, v in given.items() if k not in FLAGS}
    new, entropies = (z[k].clone().requires_grad_() for k in ("cur_logps", "entropies"))
    if "isr" in given:
        settings["importance_sampling_ratio"] = z[given["isr"]]
    if "use_samp" in given:
        settings["sampling"] = z["sampling_logps"]
    if "tool" in given:
        settings["tool_mask"] = z["tool_mask"]
    loss = api.token_loss(
        given["loss_type"], new, None if "onpolicy" in given else z["old_logps"], z["ref_logps"],
        z["mask_with_dropped_row" if "dropped" in given else "mask"],
        z[f"{case}__advantages"] if "adv2d" in given else z["advantages"],
        entropies=entropies, max_completion_length=8, **settings,
    )  # fmt: skip
    close(loss.detach(), z[f"{case}__loss"], 1e-6)
    (grad,) = torch.autograd.grad(loss, new, retain_graph=True)
    close(grad, z[f"{case}__grad"], 1e-6)
    if f"{case}__grad_entropy" in z:
        (grad,) = torch.autograd.grad(loss, entropies)
        close(grad, z[f"{case}__grad_entropy"], 1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("floor", [False, True])
def test_trls_correction_of_another_engine(level, mode, floor):
    z, name = arrays(TRL), f"isr_{level}_{mode}" + ("_min" if floor else "")
    high, low = {"token": (1.1, 0.9), "sequence": (1.3, 0.8)}[level]
    mask = z["mask"].bool()
    ratio = mismatch(z["old_logps"], z["sampling_logps"], mask, level)
    close(bounded(ratio, mode, low if floor else 0.0, high), z[name])
    if not floor:
        loss, want = (
            api.token_loss(
                "grpo", z["cur_logps"], z["old_logps"], None, mask, z["advantages"], **settings
            )
            for settings in (
                {
                    "sampling": z["sampling_logps"],
                    "mismatch": f"{level}_{mode}",
                    "mismatch_max": high,
                },
                {"importance_sampling_ratio": z[name]},
            )
        )
        close(loss, want, 1e-7)
    assert Mismatch().high == 3.0, "TRL's default, with sequence_mask"


OTHERS = {
    "rloo": ("rloo", {}),
    "gmpo": ("gmpo", {"epsilon": 0.4}),
    "gmpo_kl": ("gmpo", {"epsilon": 0.4, "beta": 0.04}),
    "gspo_token": ("gspo_token", {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "gspo_token_.2": ("gspo_token", {}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_trls_other_trainers(case):
    z, (kind, settings) = arrays("mm_trl_rloo_gmpo_gspotoken"), OTHERS[case]
    new = z["cur"].clone().requires_grad_()
    args = (z["old"], z["ref"], z["mask"], z["advantages"])
    loss = api.token_loss(kind, new, *args, **settings)
    close(loss.detach(), z[f"{case}__loss"], 1e-6)
    close(torch.autograd.grad(loss, new)[0], z[f"{case}__grad"], 1e-6)


def test_trls_rloo_advantages():
    z = arrays("mm_trl_rloo_gmpo_gspotoken")
    weights = torch.tensor([1.0, 0.5])

    def credit(**settings: object) -> Tensor:
        return api.estimator("rloo", z["rewards"], 4, weights=weights, **settings)

    close(credit(), z["rloo_adv_plain"], 2e-6)
    close(credit(normalize=True), z["rloo_adv_norm"], 2e-6)
    close(credit(clip=1.0), z["rloo_adv_clip"], 2e-6)
    rows = torch.tensor([*range(6), 0, 1])
    apart = ((z["old"] - z["ref"]) * z["mask"]).sum(1)[rows]
    close(credit(divergence=apart, beta=0.05), z["rloo_adv_kl"], 2e-6)


def groups() -> tuple[dict[str, Tensor], Tensor]:
    z = arrays("mm_adv_misc")
    return z, z["group"]


MISC = ["maxrl", "clipped_pnorm", "misc_grpo", "misc_maxrl", "misc_reinforce_without_baseline",
        "misc_reinforce_with_baseline", "misc_reinforce_with_p_normalization",
        "misc_conditional_expectation", "misc_vr-cond"]  # fmt: skip


@pytest.mark.parametrize("name", MISC)
def test_success_estimators(name):
    z, group = groups()
    for kind in ("bin", "cont"):
        if f"{kind}__{name}" in z:
            got = api.estimator(name, z[f"{kind}_rewards"], group)
            close(got, z[f"{kind}__{name}"][:, 0], 2e-6)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k(k):
    z = arrays("mm_adv_misc")  # its PKPO is a third party's, and biased: see test_success_credit
    for c in range(9):
        rewards = (torch.arange(8) < c).double()
        close(api.estimator("passk", rewards, 8, k=k), z[f"passk_k{k}_c{c}"], 1e-9)


def test_bnpo():
    z, group = groups()
    close(api.estimator("bnpo", z["bin_rewards"], group), z["bin__bnpo"][:, 0], 2e-6)


RISK = {
    "adv_batch": {},
    "adv_mix_track": {"quantiles": (1.0, 2.2)},
    "adv_mixrisk": {"w_mix": 1.5},
    "adv_std": {"scaled": True},
    "adv_nonat": {"natural": False},
    "adv_summean": {"credit": "sum_mean"},
}


@pytest.mark.parametrize("case", RISK)
def test_riskpo(case):
    z = arrays("mm_adv_riskpo")
    got = api.estimator("riskpo", z["rewards"], z["question"], bundle=3, **RISK[case])
    close(got, z[case], 2e-6)
