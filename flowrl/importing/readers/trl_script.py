"""A Python script that trains with TRL: the constants of its calls, and the command in its
docstring. The script is not run."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.importing.leaves import Leaves, Unresolved, guarded
from flowrl.importing.readers.python_config import python_tree

_CONFIGS = {"GRPOConfig": "GRPO", "RLOOConfig": "RLOO"}
_TRAINERS = {"GRPOTrainer": "GRPO", "RLOOTrainer": "RLOO"}
_PEFT = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules", "use_rslora": "use_rslora", "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip
MOST_NUMBER = 1e12  # on either side of an operation in a script
_SKIPPED = (
    "args",
    "eval_dataset",
    "processing_class",
    "peft_config",
    "callbacks",
    "quantization_config",
    "train_dataset",
)
_CODE = ("rollout_func", "tools", "environment_factory")
OTHER_TRAINERS = (
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "PPOTrainer",
    "OnlineDPOTrainer",
    "RewardTrainer",
    "NashMDTrainer",
    "XPOTrainer",
    "CPOTrainer",
    "ORPOTrainer",
    "GKDTrainer",
    "BCOTrainer",
    "AsyncGRPOTrainer",
    "SDPOTrainer",
    "SDFTTrainer",
    "DistillationTrainer",
)


class TrlScript:
    """The constants of a script.

    leaves    arguments, by the names that the command line has for them
    trainer   GRPO, RLOO, or another class's name; None if there is none
    command   the command of its docstring, or an empty text
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = python_tree(path)
        self.names = self._constants()
        self.functions = {n.name for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}
        self.top = {n.name for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.leaves: Leaves = {}
        self.trainer: str | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._call(node)
        self.command = _command(ast.get_docstring(self.tree) or "")

    def _constants(self) -> dict[str, Any]:
        constants: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                value = _literal(node.value, constants)
                name = node.targets[0].id
                # a name with two values stands for none
                constants[name] = value if name not in constants else Unresolved(name)
        return constants

    def _call(self, node: ast.Call) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name in _CONFIGS:
            self.trainer = _CONFIGS[name]
            for keyword in node.keywords:
                if keyword.arg:
                    self._leaf(keyword.arg, keyword.value)
        elif name == "LoraConfig":
            self.leaves["use_peft"] = True
            for keyword in node.keywords:
                if keyword.arg in _PEFT:
                    self._leaf(_PEFT[keyword.arg], keyword.value)
                elif keyword.arg not in (None, "task_type", "bias"):
                    self._leaf(f"peft_config.{keyword.arg}", keyword.value)
        elif name in _TRAINERS:
            self.trainer = _TRAINERS[name]
            for keyword in node.keywords:
                self._trainer_argument(keyword)
        elif name in OTHER_TRAINERS and self.trainer is None:
            self.trainer = name
        elif name == "load_dataset":
            self._data_set(node)
        elif name == "map" and isinstance(node.func, ast.Attribute):
            self.leaves["(rows changed by code)"] = ast.unparse(node)[:60]

    def _trainer_argument(self, keyword: ast.keyword) -> None:
        if keyword.arg == "reward_funcs":
            listed = (
                keyword.value.elts
                if isinstance(keyword.value, ast.List | ast.Tuple)
                else [keyword.value]
            )
            self.leaves["reward_funcs"] = [self._reward(function) for function in listed]
            if any(isinstance(function, Unresolved) for function in self.leaves["reward_funcs"]):
                self.leaves["reward_funcs"] = Unresolved(ast.unparse(keyword.value)[:80])
        elif keyword.arg in _CODE:
            self.leaves[keyword.arg] = ast.unparse(keyword.value)[:60]
        elif keyword.arg == "model":
            value = _literal(keyword.value, self.names)
            if isinstance(value, str):
                self.leaves.setdefault("model_name_or_path", value)
        elif keyword.arg and keyword.arg not in _SKIPPED:
            self._leaf(keyword.arg, keyword.value)

    def _reward(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self.top:
            return f"{self.path}:{node.id}"
        if (
            isinstance(node, ast.Name)
            and node.id not in self.functions
            and node.id not in self.names
        ):
            return node.id  # imported, such as trl.rewards.accuracy_reward
        value = _literal(node, self.names)
        return value if isinstance(value, str) else Unresolved(ast.unparse(node)[:60])

    def _data_set(self, node: ast.Call) -> None:
        if "dataset_name" in self.leaves or not node.args:
            return
        value = _literal(node.args[0], self.names)
        if not isinstance(value, str):
            return
        self.leaves["dataset_name"] = value
        if len(node.args) > 1 and isinstance(config := _literal(node.args[1], self.names), str):
            self.leaves["dataset_config"] = config
        for keyword in node.keywords:
            if keyword.arg == "split":
                split = _literal(keyword.value, self.names)
                split = split[0] if isinstance(split, list) and split else split
                if isinstance(split, str):
                    self.leaves["dataset_train_split"] = split
            elif keyword.arg == "name":
                self._leaf("dataset_config", keyword.value)

    def _leaf(self, name: str, node: ast.expr) -> None:
        value = _literal(node, self.names)
        if isinstance(value, dict):
            for key, inner in value.items():
                self.leaves[f"{name}.{key}"] = guarded(f"{name}.{key}", inner)
        else:
            self.leaves[name] = guarded(name, value)


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """A constant, a name that has one, or their sum, difference, product or quotient."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [_literal(side, names) for side in (node.left, node.right)]
        numbers = all(isinstance(s, int | float) and abs(s) <= MOST_NUMBER for s in sides)
        if numbers and (sides[1] or not isinstance(node.op, ast.Div | ast.FloorDiv)):
            return _ARITHMETIC[type(node.op)](*sides)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unresolved(ast.unparse(node)[:80])


def _command(docstring: str) -> str:
    """The first command of a docstring that starts a training."""
    text = re.sub(r"^\s*```\w*\s*$", "", docstring, flags=re.MULTILINE)
    lines = text.splitlines()
    starts = [
        i
        for i, line in enumerate(lines)
        if re.match(r"\s*(accelerate launch|python|torchrun|trl |uv run|CUDA_VISIBLE)", line)
    ]
    for first in starts:
        last = first
        while last < len(lines) - 1 and lines[last].rstrip().endswith("\\"):
            last += 1
        command = "\n".join(lines[first : last + 1])
        if ".py" in command or command.lstrip().startswith("trl "):
            return command.strip().rstrip("\\")
    return ""
