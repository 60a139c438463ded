"""The presets of configs/papers have the published numbers, and each plans."""

from typing import Any

import pytest

from flowrl.paths import PROJECT
from flowrl.prompts import on_hub
from flowrl.settings import LanguageSettings, RunSettings
from flowrl.settings.checks.machine import check_language, check_pipeline
from flowrl.settings.model.levels import LevelShift
from flowrl.settings.read import read_run

PRESETS = {path.stem: path for path in sorted((PROJECT / "configs" / "papers").glob("*.yaml"))}
SD3, FLUX = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev"
WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
Table = dict[str, Any]


def of(base: Table, **changes: Any) -> Table:
    """A row like `base`; `recipe__clip` stands for recipe.clip."""
    return base | {key.replace("__", "."): value for key, value in changes.items()}


def guided(scale: float) -> Table:
    return {"model.guidance.sample": scale, "model.guidance.train": scale}


FLOW_GRPO = guided(4.5) | {
    "model.pipeline": SD3, "model.height": 512, "model.width": 512, "model.dtype": "float16",
    "model.lora.rank": 32, "model.lora.alpha": 64, "recipe.steps": 10, "recipe.group": 24,
    "recipe.eta": 0.7, "recipe.clip": 1e-4, "recipe.kl": 0.04, "recipe.scale": "batch",
    "prompts.per_iteration": 48, "train.lr": 3e-4, "train.updates": 2, "train.weight_decay": 1e-4,
    "train.max_grad_norm": 1.0, "evaluate.steps": 40, "evaluate.every": 60,
}  # fmt: skip
ON_FLUX = guided(3.5) | {
    "model.pipeline": FLUX, "model.dtype": "bfloat16", "model.lora.rank": 64,
    "model.lora.alpha": 128, "recipe.steps": 6, "evaluate.steps": 28, "evaluate.every": 30,
}  # fmt: skip
FAST = {k: v for k, v in FLOW_GRPO.items() if k != "recipe.scale"} | {
    "recipe.eta": 0.8, "recipe.clip": 1e-5, "recipe.kl": 0, "recipe.window": 3,
    "recipe.kernel": "cps",
}  # fmt: skip
DANCE = guided(3.5) | {
    "model.pipeline": FLUX, "model.height": 720, "model.width": 720, "model.lora": None,
    "recipe.steps": 16, "recipe.group": 12, "recipe.eta": 0.3, "recipe.clip": 1e-4,
    "recipe.fraction": 0.6, "prompts.per_iteration": 16, "train.updates": 3, "train.lr": 1e-5,
    "train.weight_decay": 1e-4, "train.max_grad_norm": 1.0, "train.iterations": 300,
    "model.sigmas": LevelShift(shift=3.0),
}  # fmt: skip
MIX = {k: v for k, v in DANCE.items() if k != "recipe.fraction"} | {
    "recipe.steps": 25, "recipe.eta": 0.7, "recipe.window": 4, "recipe.every": 25,
    "recipe.stride": 1, "prompts.per_iteration": 32, "train.updates": 4,
}  # fmt: skip
FLASH = {k: v for k, v in MIX.items() if k != "recipe.stride"} | {
    "recipe.every": 20, "recipe.ratio": 0.4, "recipe.frozen": False,
}  # fmt: skip
WHOLE = {
    "model.lora": None, "model.dtype": "bfloat16", "train.lr": 1e-6, "recipe.temperature": 1.0,
    "recipe.top_p": 1.0, "train.max_grad_norm": 1.0,
}  # fmt: skip
ON_GSM8K = WHOLE | {
    "recipe.length": 1024, "recipe.group": 5, "recipe.kl": 0.001, "prompts.per_iteration": 1024,
    "train.updates": 4,
}  # fmt: skip
NO_GROUP = {"recipe.group", "recipe.fraction", "recipe.scale"}
TEMP = {k: v for k, v in FLOW_GRPO.items() if k not in NO_GROUP} | {
    "recipe.kl": 0.004, "recipe.roots": 4, "recipe.branch": 6, "evaluate.every": 20,
    "train.iterations": 3000,
}  # fmt: skip
BRANCH = {k: v for k, v in DANCE.items() if k not in NO_GROUP} | {
    "recipe.steps": 20, "recipe.at": (0, 3, 6, 9), "recipe.branch": 2, "recipe.clip": 1e-3,
    "train.updates": 36,
}  # fmt: skip
GUARD = FLOW_GRPO | {
    "recipe.clip": 2e-6, "recipe.kl": 0, "recipe.scale": "group", "train.lr": 1e-4,
    "evaluate.every": 30,
}  # fmt: skip
GARDO = {k: v for k, v in FLOW_GRPO.items() if k != "recipe.scale"} | {
    "recipe.auxiliary": ("aesthetic", "imagereward"), "recipe.share": 0.1, "recipe.refresh": 16,
    "recipe.refresh_kl": 3e-4, "recipe.distance": "distance",
}  # fmt: skip
AWM = guided(1) | {
    "model.pipeline": SD3, "model.height": 512, "model.lora.rank": 32, "model.lora.alpha": 64,
    "model.dtype": "float16", "recipe.steps": 14, "recipe.group": 24, "recipe.levels_per_sample": 6,
    "recipe.clip": 1.0, "recipe.noise": 0.4, "recipe.weight": "ghuber", "recipe.kl": 0.001,
    "recipe.times": "discrete_wo_init", "prompts.per_iteration": 72, "train.updates": 1,
    "train.lr": 3e-4, "train.weight_decay": 1e-4, "train.max_grad_norm": 1.0,
    "evaluate.steps": 40, "evaluate.average": 0.99,
}  # fmt: skip
NFT = guided(1) | {
    "model.pipeline": SD3, "model.height": 512, "model.lora.rank": 32, "model.lora.alpha": 64,
    "model.dtype": "float16", "recipe.steps": 10, "recipe.group": 24, "recipe.beta": 1.0,
    "recipe.kl": 1e-4, "recipe.levels_per_sample": None, "recipe.mode": "all",
    "recipe.decay": (0, 0.001, 0.5),
    "prompts.per_iteration": 48, "train.updates": 1, "train.lr": 3e-4, "train.weight_decay": 1e-4,
    "train.max_grad_norm": 1.0, "evaluate.steps": 40,
}  # fmt: skip
DPPO = {k: v for k, v in FLOW_GRPO.items() if k != "recipe.clip"} | guided(1) | {
    "recipe.group": 16, "recipe.eta": 0.8, "recipe.most": 1e-7, "recipe.kl": 0.001,
    "recipe.noisy": 3, "recipe.credit": "gdpo", "prompts.per_iteration": 64, "evaluate.every": 30,
}  # fmt: skip
DGPO = {k: v for k, v in NFT.items() if k not in ("recipe.mode", "recipe.decay")} | {
    "model.guidance.sample": 4.5, "model.lora.rank": 64, "model.lora.alpha": 128,
    "recipe.levels_per_sample": 4, "recipe.levels": 0.5, "recipe.beta": 100.0, "recipe.kl": 0.001,
    "recipe.clip": 0.01, "recipe.switch": 500,
}  # fmt: skip
G2RPO = {k: v for k, v in DANCE.items() if k != "recipe.fraction"} | {
    "recipe.eta": 0.7, "recipe.at": tuple(range(8)), "recipe.grids": (1, 2), "train.updates": 8,
    "train.lr": 2e-6, "train.iterations": 301,
}  # fmt: skip
UNSCALED = {k: v for k, v in FLOW_GRPO.items() if k != "recipe.scale"}
DENSE = UNSCALED | {
    "train.updates": 1, "train.iterations": 4500, "recipe.completion": None,
}  # fmt: skip
TURNING = UNSCALED | {
    "recipe.clip": 1e-5, "recipe.kl": 0, "recipe.form": "released", "recipe.bonus": 1.0,
    "recipe.completion": None,
}  # fmt: skip

SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"
DRAFT = guided(7.5) | {
    "model.pipeline": SD15, "recipe.steps": 50, "recipe.group": 1, "recipe.scale": 1.0,
    "recipe.form": "linear", "train.lr": 4e-4,
}  # fmt: skip
LEAP = guided(3.5) | {
    "model.pipeline": SD3, "model.height": 512, "model.width": 512, "model.lora": None,
    "recipe.steps": 25, "recipe.group": 1, "recipe.form": "hinge", "recipe.bound": 0.55,
    "prompts.per_iteration": 64, "train.lr": 1e-5, "train.weight_decay": 1e-4,
    "train.max_grad_norm": 1.0, "train.iterations": 300, "evaluate.steps": 40,
    "evaluate.average": 0.995,
}  # fmt: skip

PUBLISHED: dict[str, Table] = {
    "dense_grpo_sd35m_geneval": DENSE,
    "dense_grpo_sd35m_ocr": of(DENSE, train__iterations=1500),
    "dense_grpo_sd35m_pickscore": of(DENSE, recipe__kl=0.01),
    "turning_point_sd35m_geneval": TURNING,
    "turning_point_sd35m_ocr": TURNING,
    "turning_point_sd35m_pickscore": TURNING,
    "turning_point_flux_pickscore": of(TURNING | ON_FLUX, recipe__eta=0.8),
    "vgpo_sd35m_geneval": of(UNSCALED, recipe__completion=1),
    "pro_grpo_sd35m_pickscore": {k: v for k, v in UNSCALED.items() if k != "recipe.group"} | {
        "recipe.start": 48, "recipe.keep": (24, 12), "recipe.at": (5, 7), "recipe.kl": 0.01,
    },
    "refl_sd15_imagereward": {
        "model.height": 512, "model.lora": None, "recipe.steps": 40, "recipe.group": 1,
        "recipe.first": 0.75, "recipe.stop": 1.0, "recipe.form": "hinge", "recipe.bound": 2.0,
        "recipe.scale": 1e-3,
    },
    "draft_sd15_hps": DRAFT | {"recipe.last": 1, "recipe.cut": "fixed"},
    "draft_lv_sd15_hps": DRAFT | {"recipe.draws": 2},
    "draft_sd15_alignprop": of(
        DRAFT | guided(5.0), recipe__last=8, recipe__cut="normal", recipe__spread=5.0,
        recipe__scale=0.01, train__lr=1e-3, prompts__per_iteration=128,
    ),
    "srpo_flux_hps": {
        "model.pipeline": FLUX, "model.height": 720, "model.width": 720, "model.lora": None,
        "model.guidance.sample": 1.0, "model.guidance.train": 3.5, "recipe.steps": 25,
        "recipe.group": 1, "recipe.bound": 0.7, "recipe.form": "hinge", "train.lr": 5e-6,
        "train.max_grad_norm": 0.1, "train.weight_decay": 1e-4, "prompts.per_iteration": 32,
        "recipe.strengths": ((0.1, 0.25), (0.3, 0.01)),
    },
    "leap_align_flux_hps": LEAP | {
        "model.pipeline": FLUX, "model.height": 720, "model.width": 720, "evaluate.steps": 50,
        "recipe.alpha": 0.3, "recipe.tau": 0.1,
    },
    "flow_bp_sd35m_hps": of(LEAP, recipe__active=4, recipe__late=1.0, recipe__rescale=0.5),
    "flow_bp_bridge_sd35m_hps": of(
        LEAP, recipe__active=5, recipe__late=4.0, recipe__rescale=0.0, recipe__bridge=0.5
    ),
    "flow_bp_lagrange_sd35m_hps": of(
        LEAP, recipe__order=3, recipe__second=0.25, recipe__alpha=0.1, recipe__tau=0.2,
        recipe__rescale=0.0, recipe__reach=10, recipe__spread=(2.5, 6.0, 2.0),
    ),
    "flow_dppo_sd35m_multi": DPPO,
    "flow_dppo_sd35m_multi_cps": of(DPPO, recipe__most=1e-6, recipe__kernel="cps"),
    "dgpo_sd35m_geneval": DGPO,
    "dgpo_sd35m_pickscore": of(
        DGPO, recipe__beta=10.0, recipe__levels=0.7, recipe__switch=200
    ),
    "crd_sd35m_ocr": of(
        {k: v for k, v in NFT.items() if k != "recipe.mode"}, recipe__levels_per_sample=20,
        recipe__kl=0.1, recipe__decay=(75, 0.0075, 0.999), train__updates=2,
    ),
    "fdfo_sd35m_pickscore": guided(1.0) | {
        "model.pipeline": SD3, "model.height": 512, "model.lora.rank": 32, "model.lora.alpha": 64,
        "recipe.steps": 40, "recipe.group": 2, "recipe.gamma": 0.0025, "recipe.bound": 0.03,
        "recipe.kl": 0, "prompts.per_iteration": 432, "train.updates": 4, "train.lr": 3e-5,
        "train.weight_decay": 1e-4, "train.max_grad_norm": 1.0, "train.iterations": 100,
    },
    "euphonium_hunyuan_video": {
        "recipe.steps": 16, "recipe.group": 8, "recipe.eta": 0.25, "recipe.clip": 1e-4,
        "recipe.fraction": 0.6, "recipe.scale": 0.2, "recipe.kl_beta": 3.125, "recipe.first": 12,
        "recipe.outcome": 1.0, "recipe.process": 1.0, "train.lr": 1e-6,
        "model.sigmas": LevelShift(shift=5.0),
    },
    "opd_sd35m_ocr": guided(1.0) | {
        "model.pipeline": SD3, "model.height": 384, "model.width": 384, "model.lora.rank": 32,
        "model.lora.alpha": 64, "recipe.steps": 10, "recipe.group": 8, "recipe.eta": 0.8,
        "recipe.window": 3, "recipe.kernel": "cps", "recipe.form": "published", "recipe.kl": 0,
        "prompts.per_iteration": 8, "train.lr": 1e-4, "train.updates": 1, "train.iterations": 100,
    },
    "flash_grpo_wan21": guided(4.5) | {
        "model.pipeline": WAN, "model.height": 480, "model.width": 832, "recipe.steps": 20,
        "model.call": {"num_frames": 81, "max_sequence_length": 512}, "recipe.clip": 1e-3,
        "recipe.group": 4, "recipe.kl": 0, "recipe.kernel": "wan", "train.lr": 1e-4,
        "evaluate.steps": 50,
    },
    "g2rpo_flux": G2RPO,
    "e_grpo_flux": {k: v for k, v in G2RPO.items() if k not in ("recipe.at", "recipe.grids")},
    "branch_grpo_flux_paper": of(
        BRANCH, train__updates=25, recipe__prune="deeper", recipe__split=4.0,
        recipe__fusion="likely_paths",
    ),
    "flow_grpo_sd35m_geneval": FLOW_GRPO,
    "flow_grpo_sd35m_ocr": FLOW_GRPO,
    "flow_grpo_sd35m_pickscore": of(FLOW_GRPO, recipe__kl=0.01),
    "flow_grpo_flux_pickscore": of(FLOW_GRPO | ON_FLUX, recipe__eta=0.9, recipe__kl=0),
    "flow_grpo_wan21_ocr": of(
        FLOW_GRPO, model__pipeline=WAN, model__height=240, model__width=416,
        model__call={"num_frames": 33, "max_sequence_length": 512}, model__dtype="bfloat16",
        recipe__steps=20, recipe__group=4, recipe__clip=1e-3, recipe__kl=0.004,
        recipe__scale="group", recipe__kernel="wan", recipe__kl_form="exact", train__lr=1e-4,
        evaluate__steps=50, evaluate__every=30, prompts__per_iteration=32,
    ),
    "flow_grpo_fast_sd35m_geneval": FAST | guided(1),
    "flow_grpo_fast_sd35m_pickscore": of(
        FAST | guided(1), recipe__group=18, prompts__per_iteration=64
    ),
    "flow_grpo_fast_flux_geneval": FAST | ON_FLUX,
    "flow_grpo_fast_flux_pickscore": of(FAST | ON_FLUX, recipe__scale="group"),
    "dance_grpo_flux": DANCE,
    "dance_grpo_flux_lora": of(
        {k: v for k, v in DANCE.items() if k != "model.lora"}, recipe__steps=12, train__lr=3e-4,
        model__lora__rank=128, model__lora__alpha=256, train__updates=2, train__iterations=301,
    ),
    "dance_grpo_hunyuan_video": of(
        DANCE | guided(6), model__pipeline="hunyuanvideo-community/HunyuanVideo",
        model__height=480, model__width=480, model__call={"num_frames": 53}, recipe__group=24,
        recipe__eta=0.25, recipe__train_share=0.3333, recipe__shared_noise=False,
        prompts__per_iteration=32, train__updates=2, train__iterations=202,
        model__sigmas=LevelShift(shift=5.0),
    ),
    "dance_grpo_wan21": of(
        DANCE | guided(5), model__pipeline=WAN, model__height=512, model__width=512,
        model__call={"num_frames": 1}, recipe__steps=20, train__updates=1, train__iterations=1000,
        model__sigmas=None,  # Wan's call takes none
    ),
    "mix_grpo_flux": MIX,
    "mix_grpo_flash_flux": FLASH,
    "mix_grpo_flash_flux_frozen": of(FLASH, recipe__ratio=0.2, recipe__frozen=True),
    "temp_flow_sd35m_geneval": TEMP,
    "temp_flow_sd35m_pickscore": of(TEMP, recipe__kl=0.001, train__iterations=1000),
    "temp_flow_flux_hpsv3": of(
        TEMP | ON_FLUX, model__height=1024, model__width=1024, recipe__steps=10, recipe__eta=0.9,
        evaluate__steps=50, evaluate__every=20, train__iterations=250,
    ),
    "branch_grpo_flux": BRANCH,
    "branch_grpo_mix_flux": of(BRANCH, recipe__window=4, recipe__every=30, train__updates=6),
    "gardo_sd35m_ocr": GARDO,
    "grpo_guard_sd35m_geneval": GUARD,
    "grpo_guard_sd35m_ocr": GUARD,
    "grpo_guard_sd35m_pickscore": of(GUARD, recipe__clip=4e-6),
    "grpo_guard_flux_pickscore": of(
        GUARD | ON_FLUX, recipe__clip=4e-6, recipe__eta=0.9, train__lr=2e-4
    ),
    "awm_sd35m_geneval": AWM,
    "awm_sd35m_ocr": of(AWM, recipe__kl=0.003),
    "awm_sd35m_pickscore": of(
        AWM, recipe__kl=0.0001, recipe__noise=0.0, recipe__times="discrete",
        prompts__per_iteration=24,
    ),
    "nft_sd35m_geneval": NFT,
    "nft_sd35m_pickscore": NFT,
    "nft_sd35m_hpsv2": NFT,
    "nft_sd35m_ocr": of(
        NFT, recipe__beta=0.1, train__updates=2, recipe__decay=(75, 0.0075, 0.999)
    ),
    "nft_sd35m_multi": of(NFT, recipe__beta=0.1, recipe__steps=25),
    "text_grpo_qwen25_gsm8k": of(ON_GSM8K, recipe__clip=0.2),
    "text_grpo_qwen25_05b_gsm8k": of(
        ON_GSM8K, recipe__clip=0.2, model__language="Qwen/Qwen2.5-0.5B-Instruct"
    ),
    "text_grpo_qwen25_code": of(ON_GSM8K, recipe__clip=0.2, prompts__per_iteration=128),
    "text_grpo_qwen25_7b_server": of(
        {k: v for k, v in ON_GSM8K.items() if k != "model.lora"}, recipe__clip=0.2,
        model__language="Qwen/Qwen2.5-7B-Instruct", train__lr=3e-5, model__lora__rank=32,
    ),
    "text_grpo_janus_pro_7b": {
        "recipe.length": 576, "recipe.group": 8, "recipe.kl": 0.01, "recipe.temperature": 1.0,
        "model.image.guidance": 5.0, "model.dtype": "bfloat16", "model.lora": None,
        "prompts.per_iteration": 16, "train.lr": 1e-6, "train.iterations": 1600,
    },
    "text_rloo_qwen25_gsm8k": of(ON_GSM8K, recipe__kl_in="reward"),
    "text_gspo_qwen25_gsm8k": of(
        WHOLE, model__language="Qwen/Qwen2.5-3B-Instruct", recipe__length=8192, recipe__group=16,
        recipe__low=3e-4, recipe__high=4e-4, prompts__per_iteration=512, train__updates=4,
        train__schedule__warmup=25, train__weight_decay=0.1, train__iterations=500,
    ),
    "text_dapo_qwen25_math": of(
        WHOLE, recipe__length=8192, recipe__group=16, recipe__low=0.2, recipe__high=0.28,
        recipe__cut="train", prompts__per_iteration=512, train__updates=16, budget__flat="resample",
        train__schedule__warmup=10, train__weight_decay=0.1, train__iterations=200,
    ),
    "text_dr_grpo_qwen25_math": of(
        WHOLE, model__language="Qwen/Qwen2.5-Math-1.5B", recipe__length=3000, recipe__group=8,
        prompts__per_iteration=128, train__updates=8,
    ),
}  # fmt: skip


def at(run: RunSettings, place: str) -> Any:
    value: Any = run
    for name in place.split("."):
        value = getattr(value, name)
    return value


def test_every_preset_has_its_row():
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_numbers(name):
    run = read_run(PRESETS[name])
    differ = {k: at(run, k) for k, value in PUBLISHED[name].items() if at(run, k) != value}
    assert not differ
    assert name.startswith(run.recipe.name)
    assert "arXiv:" in PRESETS[name].read_text().splitlines()[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_plans(name):
    run, row = read_run(PRESETS[name]), PUBLISHED[name]
    algorithm = run.algorithm()
    left = row.get("recipe.keep", (24 if "recipe.roots" in row else 16,))[-1]  # of a group
    assert algorithm.group == row.get("recipe.group", left)
    assert run.train.updates <= run.prompts.per_iteration * algorithm.group
    for iteration in (0, run.train.iterations - 1):
        assert algorithm.plan(run.levels(algorithm.steps), iteration, run.train.seed)
    if isinstance(run.model, LanguageSettings):
        check_language(run.model.language, None)
    else:
        check_pipeline(run.model.pipeline)


def test_the_readme_says_where_every_file_comes_from():
    said = (PROJECT / "configs" / "papers" / "README.md").read_text()
    for path in PRESETS.values():
        run = read_run(path)
        names = [spec.name for spec in run.rewards]
        sources = [s.source for s in (*run.prompts.train, *(run.prompts.held_out or ()))]
        for source in sources:
            assert (source if on_hub(source) else source.rsplit("/", 1)[0]) in said, path
        assert all(f"`{name}`" in said for name in names), path
