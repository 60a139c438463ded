"""Distillation of loaded teachers: whose weights judge which row, costs, resumes and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.cli.plan import describe_run
from flowrl.errors import UserError
from flowrl.estimate.time import iteration_work
from flowrl.iteration.features.teachers import TASKS, judged_by_teachers
from flowrl.iteration.minibatches import share_of
from flowrl.models.diffusers.lora.teacher_weights import teacher_weights
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.session.learner import load_policy
from flowrl.session.progress import Progress
from flowrl.settings.read import check_run, run_from
from tests.support import process_runs, runs
from tests.support.advice import advice
from tests.support.iterations import chunk_loss, collect, iterate

OPD = {"name": "opd", "steps": 4, "group": 2, "window": 2}
LORA = {"big": {"rank": 4, "alpha": 8}, "small": {"rank": 2, "alpha": 6}}
PROMPT = ["a red ball"]


def plain(settings: dict[str, Any], lora: dict[str, Any] | None) -> PipelinePolicy:
    """A policy of the same base, without teachers."""
    model = settings["model"] | {"lora": lora}
    own = settings | {"recipe": {"name": "nft", "steps": 4}, "model": model, "teachers": None}
    policy = load_policy(run_from(own, "test"), torch.device("cpu"))
    assert isinstance(policy, PipelinePolicy)
    return policy


def trained(policy: PipelinePolicy, seed: int) -> PipelinePolicy:
    """Weights that a training could have left."""
    draws = torch.Generator().manual_seed(seed)
    for p in policy.trainable().values():
        p.data += 0.1 * torch.randn(p.shape, generator=draws)
    return policy


def velocity(policy: PipelinePolicy) -> torch.Tensor:
    x = torch.randn(1, *policy.shape(4), generator=torch.Generator().manual_seed(0))
    return policy.open(PROMPT, (), 4).policy(x, torch.tensor([0.75]), torch.tensor([0])).detach()


@pytest.fixture(scope="module")
def teachers(pipeline, tmp_path_factory) -> Path:
    """Two adapters: of the student's rank, and of a smaller one."""
    folder = tmp_path_factory.mktemp("teachers")
    for task, lora in LORA.items():
        tree = runs.tree(pipeline, folder, OPD)
        trained(plain(tree, lora), lora["rank"]).save(folder / task)
    return folder


@pytest.fixture
def settings(pipeline, tmp_path, teachers) -> dict[str, Any]:
    """A student of two tasks, each with a teacher."""
    tree = runs.tree(pipeline, tmp_path, OPD, self_test="off", lr=1e-3)
    tree["evaluate"] |= {"steps": 2, "samples": 2, "per_prompt": 1}
    tasks = (("red", "big"), ("blue", "small"), ("old", "big"), ("new", "small"))
    rows = [{"prompt": f"a {word} ball", "task": task} for word, task in tasks]
    prompts = tmp_path / "tasks.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["prompts"] = {"train": str(prompts), "held_out": str(prompts), "per_iteration": 4}
    folders = {task: str(teachers / task) for task in LORA}
    return tree | {"teachers": {"folders": folders, "column": "task"}}


@pytest.mark.slow
def test_each_row_is_judged_by_the_teacher_of_its_task(settings, teachers, tmp_path):
    """A teacher is the same as a policy with its weights alone, whatever its rank."""
    kept = runs.opened(settings, tmp_path)
    policies, experience = kept.learner.policies, collect(kept, 0)
    assert sorted(experience.table[TASKS]) == ["big", "big", "small", "small"]
    for task, lora in LORA.items():
        alone = plain(settings, lora)
        alone.load_weights(teachers / task)
        with policies.using(f"teacher/{task}"):
            here = velocity(kept.learner.policy)
        torch.testing.assert_close(here, velocity(alone), atol=1e-5, rtol=1e-5)
        assert (here - velocity(kept.learner.policy)).abs().max() > 1e-2
    rows = experience.rows[0]
    judged = judged_by_teachers(kept.learner, experience.policy, rows, experience.table[TASKS])
    for place, task in enumerate(experience.table[TASKS]):
        with torch.no_grad(), policies.using(f"teacher/{task}"):
            whole = kept.algorithm.likelihood.evaluate(experience.policy, rows)
        at = rows.prompt == place
        assert torch.allclose(judged.out[at], whole.out[at], atol=1e-5)
        assert torch.allclose(judged.logp[at], whole.logp[at], atol=1e-4)


@pytest.mark.slow
def test_the_student_comes_nearer_at_the_planned_cost(settings, tmp_path):
    run = run_from(settings, "test")
    kept = runs.session_of(run, tmp_path)
    assert not any(name.startswith("teacher") for name in kept.learner.policies.state())
    progress = Progress()
    before = {n: w.clone() for n, w in kept.learner.policies._weights["teacher/big"].items()}
    metrics = [iterate(kept, progress).metrics for _ in range(4)]
    work = iteration_work(run)
    assert metrics[0]["count/frozen"] == work.frozen == 4 * 2 * 2  # prompts, group, window
    assert "16 evaluations by 2 teachers" in describe_run(run, 0, None)
    assert metrics[0]["kl_teacher"] > 0 and metrics[-1]["kl_teacher"] < metrics[0]["kl_teacher"]
    assert metrics[0]["loss"] == pytest.approx(metrics[0]["kl_teacher"])
    after = kept.learner.policies._weights["teacher/big"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_learns_nothing(settings, tmp_path):
    start = plain(settings, LORA["big"])
    start.save(tmp_path / "start")
    settings["teachers"] = {"folders": {"one": str(tmp_path / "start")}}
    kept = runs.opened(settings, tmp_path)
    experience = collect(kept, 0)
    assert experience.table[TASKS] == ("one",) * 4
    entries, _ = chunk_loss(
        kept.learner, experience, share_of(kept.learner, experience, 0, 0)[0].rows()
    )
    entries.value.sum().backward()
    grads = [p.grad for p in kept.learner.policies.parameters.values() if p.grad is not None]
    assert entries.value.abs().max() < 1e-9 and all(g.abs().max() < 1e-6 for g in grads)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["adapter", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_student_of_full_weights_takes_both_kinds(settings, teachers, tmp_path, teacher):
    if teacher == "pipeline":
        alone = trained(plain(settings, None), 5)
        alone.save(tmp_path / "whole")
        folder = tmp_path / "whole"
    else:
        alone, folder = plain(settings, LORA["small"]), teachers / "small"
        alone.load_weights(folder)
    settings["model"]["lora"] = None
    settings["teachers"] = {"folders": {"one": str(folder)}}
    kept = runs.opened(settings, tmp_path)
    with kept.learner.policies.using("teacher/one"):
        here = velocity(kept.learner.policy)
    torch.testing.assert_close(here, velocity(alone), atol=1e-5, rtol=1e-5)
    assert (here - velocity(kept.learner.policy)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("task", [0.0, 0.5])
def test_a_resumed_run_ends_with_the_same_bits(settings, tmp_path, task):
    """Teachers are loaded again, and are in no checkpoint."""
    settings["recipe"] = OPD | {"task": task, "kl": 0.1}
    settings["train"] |= {"iterations": 2, "updates": 2}
    config = runs.write(settings, tmp_path)
    whole, broken = tmp_path / "run", tmp_path / "broken"
    assert runs.flowrl("train", config, "--folder", whole) == 0
    assert runs.flowrl("train", config, "--folder", broken, "--train.iterations", "1") == 0
    assert runs.flowrl("train", "--resume", broken, "--train.iterations", "2") == 0
    for name in ("policies.safetensors", "optimizer.pt"):
        ends = [run / "checkpoints" / "000002" / name for run in (whole, broken)]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    assert (
        b"teacher" not in (whole / "checkpoints" / "000002" / "policies.safetensors").read_bytes()
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", [process_runs.DDP, process_runs.FSDP2])
def test_two_processes_do_what_one_does(settings, tmp_path, config):
    """The tasks of a process's prompts differ from those of the other's."""
    settings["model"] |= {"dtype": "float64"}
    settings["prompts"]["per_iteration"] = 3
    job: process_runs.Job = {"settings": settings, "iterations": 2}
    both = process_runs.together(config, {"opd": job}, tmp_path / "both")
    one = process_runs.alone(job, tmp_path / "one", rows_per_call=3)
    assert process_runs.apart(one, both["opd"]) < 1e-10
    assert process_runs.told(tmp_path / "both", "opd")["moved"] > 1e-5


def broken(settings: dict[str, Any], folder: Path, case: str) -> dict[str, Any]:
    teachers = settings["teachers"]
    changed: dict[str, Any] = {
        "not asked": {"recipe": {"name": "nft", "steps": 4}},
        "no folder": {"teachers": {"folders": {"one": "nowhere"}}},
        "empty": {"teachers": {"folders": {"one": str(folder)}}},
        "column": {"teachers": teachers | {"column": "kind"}},
        "unknown task": {"teachers": teachers | {"folders": {"big": "b", "tall": "t"}}},
        "whole": {"teachers": {"folders": {"one": settings["model"]["pipeline"]}}},
        "weight": {"recipe": OPD | {"weight": 0.0}},
    }
    return settings | changed[case]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("not asked", "does not use teachers: leave them out"),
        ("no folder", "teachers.folders.one: no folder nowhere"),
        ("empty", "has neither pytorch_lora_weights.safetensors nor model_index.json"),
        ("column", "line 1 has no 'kind', the column of tasks"),
        ("unknown task", "line 2: task is 'small', but the teachers are big, tall"),
        ("whole", "full weights, which do not fit the student's adapters"),
        ("weight", "without it the teacher has no effect"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, tmp_path, case, sentence):
    with pytest.raises(UserError, match=sentence):
        check_run(run_from(broken(settings, tmp_path, case), "test"))


def opened_teachers(settings: dict[str, Any], lora: dict[str, Any]) -> None:
    """Load a student, and its teachers' weights into the form of its own."""
    settings["model"]["lora"] = lora
    policy = load_policy(run_from(settings, "test"), torch.device("cpu"))
    assert isinstance(policy, PipelinePolicy)
    for task, folder in settings["teachers"]["folders"].items():
        teacher_weights(policy, Path(folder), f"teachers.folders.{task}")


def test_a_student_of_a_smaller_rank_takes_the_larger(settings):
    advice(
        "{}: its adapters have rank {}, but model.lora.rank is smaller: set it to at least {}",
        lambda: opened_teachers(settings, LORA["small"]),
        lambda: opened_teachers(settings, {"rank": 4, "alpha": 6}),
    )


@pytest.mark.slow
def test_a_student_has_the_adapters_of_its_teachers(settings):
    advice(
        "{}: {} has an adapter on {}, but this run's student has none there: set "
        "model.lora.targets as in the teacher's run",
        lambda: opened_teachers(settings, LORA["big"] | {"targets": ["attn.to_q"]}),
        lambda: opened_teachers(settings, LORA["big"]),
    )
    advice(
        "model.lora.dora: a student takes its teachers' weights as products alone: leave it out",
        lambda: opened_teachers(settings, LORA["big"] | {"dora": True}),
        lambda: opened_teachers(settings, LORA["big"]),
    )


@pytest.mark.parametrize("way", ["weights", "adapter"])
def test_a_teacher_of_full_weights_has_a_student_of_full_weights(settings, teachers, tmp_path, way):
    def checked(folder: str, lora: dict[str, int] | None) -> None:
        tree = settings | {"teachers": {"folders": {"one": folder}}}
        check_run(run_from(tree | {"model": settings["model"] | {"lora": lora}}, "test"))

    whole, adapter = settings["model"]["pipeline"], str(teachers / "big")
    advice(
        "{}: {} has full weights, which do not fit the student's adapters: set model.lora: null, "
        "or use a teacher with an adapter",
        lambda: checked(whole, LORA["big"]),
        lambda: checked(whole, None) if way == "weights" else checked(adapter, LORA["big"]),
    )


def test_a_distillation_gets_a_teacher_that_another_run_saved(settings):
    """An adapter, or the whole pipeline of a run without adapters."""
    adapter = settings["teachers"]["folders"]["big"]
    whole = settings["model"]["pipeline"]

    def followed() -> None:
        check_run(run_from(settings | {"teachers": {"folders": {"big": adapter}}}, "test"))
        student = settings["model"] | {"lora": None}
        check_run(
            run_from(settings | {"model": student, "teachers": {"folders": {"big": whole}}}, "test")
        )

    advice(
        "this recipe distils a teacher, but the run has none: add teachers: {}, with the adapter "
        "or pipeline that another run saved",
        lambda: check_run(run_from(settings | {"teachers": None}, "test")),
        followed,
    )
