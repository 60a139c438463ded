"""What `flowrl launch` prints, run by a shell with the schedulers' commands in its path."""

import os
import shlex
import subprocess

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from flowrl.cli.app import main
from flowrl.launching.cloud import CloudPlace, kubernetes_job, sky_task
from flowrl.launching.job import LaunchJob, newest_checkpoint
from flowrl.launching.on_ray import ray_commands
from flowrl.launching.slurm import SlurmLimits, slurm_script
from flowrl.paths import PROJECT

JOB = LaunchJob("configs/demo.yaml", "runs/a run", ("--train.lr", "1e-4"), nodes=3, gpus=4)
WORDS = ["train", "configs/demo.yaml", "--folder", "runs/a run", "--resume", "auto", "--wait"]


@pytest.fixture
def shell(tmp_path):
    """A shell in which accelerate writes its words, a line each, and flowrl finds its files."""
    programs = {
        "accelerate": 'printf "%s\\n" "$@"',
        "flowrl": f'echo {PROJECT}/"$2"',
        "scontrol": 'case $1 in show) echo node7;; *) echo "$@" >> requeued;; esac',
        "squeue": 'echo "$STATE"',
        "srun": 'shift; "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, **environment):
        whole = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
        return subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=whole, capture_output=True, text=True
        )

    return run


def parsed(lines):
    """The arguments of `accelerate launch`, with its file's values in them."""
    first, *words = lines.splitlines()
    assert first == "launch"
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args


def slurm(tmp_path, job=JOB):
    return slurm_script(job, SlurmLimits(time="1:00:00"), python=str(tmp_path / "python"))


SLURM = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node[7-9]", "SLURM_NODEID": "2"}


def test_a_slurm_job_launches_one_accelerate_a_machine(shell, tmp_path):
    script = slurm(tmp_path)
    assert "#SBATCH --signal=TERM@300" in script and "#SBATCH --time=1:00:00" in script
    done = shell(script, **SLURM)
    assert done.returncode == 0, done.stderr
    args = parsed(done.stdout)
    assert (args.num_machines, args.num_processes, args.machine_rank) == (3, 12, 2)
    assert (args.main_process_ip, args.main_process_port) == ("node7", 21234)
    assert [args.training_script, *args.training_script_args] == ["flowrl", *WORDS, *JOB.options]


@pytest.mark.parametrize(
    ("code", "before", "after", "state", "again"),
    [
        (0, "", "000004", "RUNNING", False),  # finished
        (1, "", "000004", "RUNNING", True),
        (1, "000004", "000008", "RUNNING", True),
        (1, "000004", "000004", "RUNNING", False),  # no progress: it would fail again
        (1, "", "", "RUNNING", False),
        (1, "000004", "000008.new", "RUNNING", False),  # half a checkpoint is none
        (1, "000004", "000008", "COMPLETING", False),  # cancelled
    ],
)
def test_a_slurm_job_requeues_itself_while_there_is_progress(
    shell, tmp_path, code, before, after, state, again
):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if before:
        (folder / before).mkdir()
    after_words = f"mkdir -p {folder}/{after}; exit {code}" if after else f"exit {code}"
    (tmp_path / "accelerate").write_text(f"#!/bin/bash\n{after_words}\n")
    job = LaunchJob("configs/demo.yaml", str(tmp_path / "run"), nodes=2, gpus=1)
    done = shell(slurm(tmp_path, job), STATE=state, **SLURM)
    assert done.returncode == (0 if again else code), done.stderr
    asked = tmp_path / "requeued"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 41234\n" if again else "")


def test_a_ray_job_launches_one_accelerate_a_machine(shell):
    """The commands; tests/processes/test_ray.py runs them where Ray is installed."""
    for rank, command in enumerate(ray_commands(JOB)):
        args = parsed(shell(command).stdout)
        assert (args.num_machines, args.num_processes, args.machine_rank) == (3, 12, rank)
        assert args.training_script_args == [*WORDS, *JOB.options]


def test_a_task_of_skypilot_uses_its_addresses(shell):
    task = yaml.safe_load(sky_task(JOB, CloudPlace(volume="disk")))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (3, "H100:4")
    assert task["volumes"] == {"/runs": "disk"}
    where = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6"}
    args = parsed(shell(task["run"], **where).stdout)
    assert (args.machine_rank, args.main_process_ip) == (1, "10.0.0.4")
    assert args.training_script_args == [*WORDS, *JOB.options]


def test_a_job_of_kubernetes_finds_its_first_machine(shell):
    text = kubernetes_job(JOB, CloudPlace(image="me/flowrl", volume="claim"))
    service, job = yaml.safe_load_all(text)
    name = service["metadata"]["name"]
    assert name == job["metadata"]["name"] == "a-run"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == 3
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    args = parsed(shell(container["command"][2], JOB_COMPLETION_INDEX="2").stdout)
    assert (args.machine_rank, args.main_process_ip) == (2, f"{name}-0.{name}")
    assert job["spec"]["template"]["spec"]["subdomain"] == name


def test_one_process_needs_no_launcher():
    alone = LaunchJob("demo", "runs/x", cpus=1)
    assert shlex.split(alone.command()) == ["flowrl", *LaunchJob("demo", "runs/x").train]


def test_machines_without_gpus_are_asked_for_by_their_cores():
    command = LaunchJob("demo", "runs/x", nodes=2, cpus=3).command("1")
    assert "ddp_cpu_2.yaml" in command and "--num_processes 6" in command


def test_the_newest_checkpoint_is_a_whole_one(tmp_path):
    assert newest_checkpoint(tmp_path) == ""
    for name in ("000004", "000008", "000009.new", "files"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == "000008"


def printed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["launch", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_settings_and_rights_reach_each_start(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: configs/demo.yaml\n")
    words = (
        "accelerate",
        "mine",
        "--folder",
        "r",
        "--gpus",
        "2",
        "--trust=code",
        "--train.lr=1e-4",
    )
    code, out, _ = printed(capsys, *words)
    assert code == 0
    assert f"train {tmp_path}/mine.yaml --folder {tmp_path}/r --resume auto" in out
    assert out.rstrip().endswith("--train.lr=1e-4 --trust=code")


@pytest.mark.parametrize(
    ("run", "options", "file"),
    [
        ("demo_lora", (), "ddp"),
        ("demo_lora", ("--nodes", "2"), "ddp_nodes"),
        ("demo", (), "fsdp2"),  # all weights are trained
        ("models/wan22_5b", ("--nodes", "2"), "fsdp2_nodes"),  # adapters beside too large a run
        ("demo_lora", ("--accelerate-config", "configs/accelerate/fsdp2.yaml"), "fsdp2"),
    ],
)
def test_adapters_that_a_gpu_holds_are_not_sharded(capsys, run, options, file):
    words = ("slurm", run, "--folder", "r", "--gpus", "8", *options)
    code, out, err = printed(capsys, *words)
    assert code == 0 and f"configs/accelerate/{file}.yaml)" in out
    if "--accelerate-config" not in options:
        kind, other = ("DDP", "fsdp2") if "ddp" in file else ("FSDP2", "ddp")
        assert f"\n{kind}: " in err and f"configs/accelerate/{other}" in err


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("demo", ("--model.dtype", "float16")),
        ("demo_joint", ()),
        ("text_demo", ("--model.lora", "{}", "--model.server",
                       '{"url": "http://localhost:1/v1", "model": "a"}')),
        ("models/qwen_image_quantized", ()),
        ("models/flux1_kontext", ("--model.lora.merge", "evaluation")),
    ],
)  # fmt: skip
def test_what_a_start_under_fsdp2_refuses_is_not_launched_so(capsys, run, options):
    words = ("slurm", run, "--folder", "r", "--gpus", "8", *options)
    code, out, err = printed(capsys, *words)
    assert code == 0 and "configs/accelerate/ddp.yaml)" in out
    assert "\nDDP: the weights of this run cannot be sharded (" in err and "other way" not in err


def test_one_process_is_not_said_to_be_sharded(capsys):
    code, out, err = printed(capsys, "slurm", "demo", "--folder", "r", "--gpus", "1")
    assert code == 0 and "accelerate" not in out and "FSDP2" not in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("slurm", "demo", "--gpus", "1"), "name the run's folder with --folder"),
        (("slurm", "demo", "--folder", "r"), "give either --gpus"),
        (("ray", "demo", "--folder", "r", "--gpus", "1", "--cpus", "1"), "give either --gpus"),
        *(
            ((place, "demo", "--folder", "/runs/r", "--gpus", "0"), "--gpus 0: give --cpus")
            for place in ("slurm", "ray", "sky", "k8s", "accelerate")
        ),
        (("k8s", "demo", "--folder", "r", "--gpus", "1"), "not below /runs"),
        (("sky", "demo", "--folder", "/runs/r", "--gpus", "1", "--submit"), "sky jobs launch"),
        (("slurm", "none", "--folder", "r", "--gpus", "1"), "no such file"),
        (("slurm", "demo", "--folder", "r", "--gpus", "1", "--train.lr", "fast"), "train.lr"),
        (("slurm", "demo", "--folder", "r", "--gpus", "1", "--accelerate-config", "x.yaml"),
         "no such file"),
        (("docker", "demo", "--folder", "r", "--gpus", "1"), "WHERE"),
        *(
            (
                (place, "demo", "--folder", "/runs/r", "--gpus", "1", f"--{name}", value),
                f"--{name} is of",
            )
            for name, value, places in (
                ("time", "1:00:00", ("slurm",)),
                ("partition", "a", ("slurm",)),
                ("account", "a", ("slurm",)),
                ("notice", "60", ("slurm",)),
                ("gpu", "A100", ("sky",)),
                ("image", "a", ("sky", "k8s")),
                ("volume", "a", ("sky", "k8s")),
                ("mount", "/r", ("sky", "k8s")),
                ("port", "4000", ("ray",)),
            )
            for place in ("slurm", "ray", "sky", "k8s", "accelerate")
            if place not in places
        ),
        (("slurm", "demo", "--folder", "r", "--gpus", "1", "--time", "a day"), "such as 24:00:00"),
        (("slurm", "demo", "--folder", "r", "--gpus", "1", "--partition", "a\nb"), "not a name"),
        (("slurm", "demo", "--folder", "r", "--gpus", "1", "--account", "a b"), "not a name"),
        (("k8s", "demo", "--folder", "/runs/r", "--gpus", "1", "--image", "a b"), "not a name"),
        (("slurm", "a\nb.yaml", "--folder", "r", "--gpus", "1"), "cannot hold"),
        (("slurm", "demo", "--folder", "r\n#", "--gpus", "1"), "cannot hold"),
    ],
)  # fmt: skip
def test_what_no_machine_could_start_is_refused(capsys, words, sentence):
    code, out, err = printed(capsys, *words)
    assert (code, out) == (2, "") and sentence in err


@pytest.mark.parametrize("time", ["30", "30:00", "24:00:00", "2-12", "2-12:30", "2-12:30:00"])
def test_a_time_of_slurm_stands_in_the_script(capsys, time):
    words = ("slurm", "demo", "--folder", "r", "--cpus", "1", "--time", time)
    code, out, _ = printed(capsys, *words)
    assert code == 0 and f"#SBATCH --time={time}\n" in out
