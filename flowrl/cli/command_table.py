"""The commands: what each calls, its line in the overview, its example and its arguments."""

from dataclasses import dataclass

RECIPE_NAME = "recipe.name"  # the setting that stands for a recipe's own


@dataclass(frozen=True)
class Command:
    """A command: its function, line in the overview and example, and the class of its arguments."""

    call: str  # module:function of the words that follow; returns the exit code
    usage: str
    about: str
    example: str
    words: str = ""  # module:Class
    settings: bool = False  # whether every setting of a run's file is an option


COMMANDS = {
    "new": Command(
        "flowrl.api.commands:new_command",
        "FOLDER [--model M] [--recipe R] [--text]",
        "write a run file, your own reward and prompts to start from",
        "flowrl new my_run --recipe flow_grpo",
        "flowrl.cli.new:New",
    ),
    "import": Command(
        "flowrl.api.commands:import_command",
        "WHAT --of PEER==VERSION --devices N --out FOLDER",
        "write a run of flow_grpo, Flow-Factory, TRL, verl or SimpleTuner as a run file",
        "flowrl import config/grpo.py:pickscore_sd3 --devices 32 --out my_run",
        "flowrl.cli.import_run:Import",
    ),
    "train": Command(
        "flowrl.api.commands:train_command",
        "CONFIG [--train.lr 1e-4 ...] | --resume RUN",
        "align a model; every setting of the file is an option",
        "flowrl train configs/demo.yaml --train.iterations 4 --recipe.group 6",
        "flowrl.settings.command_line.arguments:TrainArguments",
        settings=True,
    ),
    "runs": Command(
        "flowrl.api.commands:runs_command",
        "[FOLDER ...]",
        "list runs: how far each is, its state, best score and alarms",
        "flowrl runs",
        "flowrl.cli.runs:Runs",
    ),
    "launch": Command(
        "flowrl.api.commands:launch_command",
        "WHERE CONFIG --folder RUN [--nodes N] --gpus N",
        "print or submit what trains a run on Slurm, Ray, SkyPilot, Kubernetes or accelerate",
        "flowrl launch slurm my_run.yaml --folder runs/mine --nodes 2 --gpus 8 --time 24:00:00",
        "flowrl.cli.launch:LaunchArguments",
        settings=True,
    ),
    "sample": Command(
        "flowrl.api.commands:sample_command",
        'RUN "a red circle" ...',
        "generate samples with a run's weights",
        'flowrl sample runs/demo-0001 "a red circle" --weights best --count 8',
        "flowrl.settings.command_line.arguments:SampleArguments",
    ),
    "evaluate": Command(
        "flowrl.api.commands:evaluate_command",
        "RUN [--prompts FILE ...]",
        "score a run's weights, or its base, on prompts",
        "flowrl evaluate runs/demo-0001 --weights base --rewards shapes brightness",
        "flowrl.settings.command_line.arguments:EvaluateArguments",
    ),
    "report": Command(
        "flowrl.api.commands:report_command",
        "RUN",
        "write a run's page: curves, samples over the run, tree, settings, alarms",
        "flowrl report runs/demo-0001 --out demo.html",
        "flowrl.cli.report:Report",
    ),
    "compare": Command(
        "flowrl.api.commands:compare_command",
        "RUN RUN ...",
        "write several runs on one page, with paired intervals over prompts",
        "flowrl compare runs/demo-0001 runs/demo_lora-0001 --out comparison.html",
        "flowrl.cli.report:Compare",
    ),
    "export": Command(
        "flowrl.api.commands:export_command",
        "RUN [--merged] [--push-to-hub OWNER/NAME]",
        "write an adapter for diffusers, ComfyUI and kohya's tools, with a model card",
        "flowrl export runs/demo-0001 --weights best --push-to-hub me/shapes",
        "flowrl.settings.command_line.arguments:ExportArguments",
    ),
    "convert": Command(
        "flowrl.api.commands:convert_command",
        "FILE --config FOLDER --out FOLDER | FOLDER --out FILE",
        "write a single file of weights as a pipeline's folder, or the file of a folder",
        "flowrl convert my_flux.safetensors --config FLUX.1-dev --out my_flux",
        "flowrl.cli.convert:Convert",
    ),
    "plan": Command(
        "flowrl.api.commands:plan_command",
        "CONFIG ...",
        "describe an iteration and its costs, without loading weights",
        "flowrl plan configs/papers/*.yaml --memory 80GiB",
        "flowrl.settings.command_line.arguments:PlanArguments",
        settings=True,
    ),
    "calibrate": Command(
        "flowrl.api.commands:calibrate_command",
        "CONFIG",
        "find the noise of each step for dense_grpo, before a run",
        "flowrl calibrate configs/papers/dense_grpo_sd35m_ocr.yaml --rounds 20",
        "flowrl.cli.calibrate:Calibrate",
        settings=True,
    ),
    "prove": Command(
        "flowrl.api.commands:prove_command",
        "CONFIG | --model PIPELINE",
        "compare whole samples with the pipeline's own call",
        "flowrl prove configs/demo.yaml --model.guidance.sample 4.5",
        "flowrl.settings.command_line.arguments:ProveArguments",
        settings=True,
    ),
    "recipes": Command(
        "flowrl.api.commands:recipes_command",
        "[NAME] [--all]",
        "list the algorithms by evidence, or one algorithm's settings",
        "flowrl recipes flow_grpo",
        "flowrl.cli.recipe_text:Recipes",
    ),
    "rewards": Command(
        "flowrl.api.commands:rewards_command",
        "[NAME]",
        "list the rewards by what they score, or one reward's settings and needs",
        "flowrl rewards clip",
        "flowrl.cli.reward_text:Rewards",
    ),
    "serve-reward": Command(
        "flowrl.api.commands:serve_reward_command",
        "NAME [--port 8100 ...]",
        "serve a reward over HTTP, for {name: remote, url: ...}",
        "flowrl serve-reward '{name: shapes, kind: strict}' --port 8100",
        "flowrl.cli.serve:Serve",
    ),
    "vote": Command(
        "flowrl.api.commands:vote_command",
        "RUN | RUN RUN | FOLDER | TABLE",
        "let people compare samples on a page, blind: a run with its base, two runs, a folder",
        'flowrl vote runs/demo-0001 --question "Which one looks better?"',
        "flowrl.cli.vote:Vote",
    ),
    "fit-reward": Command(
        "flowrl.api.commands:fit_reward_command",
        "VOTES --out FOLDER",
        "fit a reward to votes, and measure it on prompts that it has not seen",
        "flowrl fit-reward votes-0001/votes.jsonl --out taste",
        "flowrl.votes.fit:FitReward",
    ),
    "score": Command(
        "flowrl.api.commands:score_command",
        "FOLDER --rewards A B",
        "score a folder of images: a table and a contact sheet",
        "flowrl score images --rewards brightness,colour",
        "flowrl.evaluation.scoring:ScoreArguments",
    ),
    "evaluate-rewards": Command(
        "flowrl.api.commands:evaluate_rewards_command",
        "DATA --rewards A B",
        "compare rewards with human preferences: a page",
        "flowrl evaluate-rewards configs/preferences/pairs.jsonl --rewards shapes,brightness",
        "flowrl.evaluation.reward_evaluation:EvaluateRewards",
    ),
    "suites": Command(
        "flowrl.api.commands:suites_command",
        "[NAME]",
        "list prompt sets with their own metrics",
        "flowrl suites shapes",
        "flowrl.evaluation.suites:Suites",
    ),
    "doctor": Command(
        "flowrl.api.commands:doctor_command",
        "[RUN] [--device cuda] [--sandbox]",
        "check versions, extras, the hub's cache and launchers; test a device or the sandbox",
        "flowrl doctor --device cuda",
        "flowrl.cli.doctor:Doctor",
    ),
    "drill": Command(
        "flowrl.api.commands:drill_command",
        "RUN [--only kills fills]",
        "kill, hang, fill and cut copies of a run, and compare their ends",
        "flowrl drill runs/demo-0001 --yes",
        "flowrl.cli.drill:DrillArguments",
    ),
    "path": Command(
        "flowrl.cli.app:path_command",
        "NAME",
        "print the path of a file that comes with flowrl",
        "flowrl path configs/accelerate/ddp.yaml",
    ),
    "completion": Command(
        "flowrl.cli.completion:completion_command",
        "SHELL",
        "print the script that completes commands, options and runs in bash, zsh or fish",
        "flowrl completion bash >> ~/.bashrc",
    ),
    "schema": Command(
        "flowrl.api.commands:schema_command",
        "",
        "print the JSON schema of a run's file, for editors",
        "flowrl schema > flowrl.schema.json",
    ),
}
