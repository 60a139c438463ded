"""A Python script that trains with TRL: the constants of its calls, the defaults of its own
argparse, and the command in its docstring. The script is not run."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.importing.leaves import (
    FILES_OF,
    MADE_ROWS,
    MOST_NUMBER,
    Leaves,
    Secret,
    Unresolved,
    guarded,
)
from flowrl.importing.readers.python_config import python_tree

_CONFIGS = {"GRPOConfig": "GRPO", "RLOOConfig": "RLOO"}
_TRAINERS = {"GRPOTrainer": "GRPO", "RLOOTrainer": "RLOO"}
_PEFT = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules", "use_rslora": "use_rslora", "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip
_ORDER = (  # of the arguments of both trainers
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
    "reward_processing_classes", "callbacks", "optimizers", "peft_config",
)  # fmt: skip
_READ_ELSEWHERE = ("args", "eval_dataset", "peft_config", "train_dataset")
_CODE = ("rollout_func", "tools", "environment_factory", "callbacks")
_ROW_CHANGES = "(rows changed by code)"
_ROW_CODE = {  # methods of datasets.Dataset
    "from_dict": MADE_ROWS, "from_list": MADE_ROWS, "from_generator": MADE_ROWS,
    "from_pandas": MADE_ROWS,
} | dict.fromkeys(
    ("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns",
     "select_columns", "train_test_split", "take", "skip", "shard", "cast_column", "add_column",
     "concatenate_datasets", "interleave_datasets"),
    _ROW_CHANGES,
)  # fmt: skip
_LOADED = {"torch_dtype": "dtype", "dtype": "dtype", "attn_implementation": "attn_implementation",
           "revision": "model_revision", "load_in_4bit": "load_in_4bit",
           "load_in_8bit": "load_in_8bit"}  # fmt: skip
_EVALUATED = ("test", "eval", "val", "dev", "held")  # how names of such rows begin
_CONDITIONS = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.Match)


class TrlScript:
    """The constants of a script.

    words      values for the script's own argparse, by name
    arguments  that argparse's values, by name: those of `words`, else its defaults
    leaves     arguments, by the names that the command line has for them
    trainer    GRPO, RLOO, or another class's name; None if there is none
    command    the command of its docstring, or an empty text
    """

    def __init__(self, path: Path, words: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.tree = python_tree(path)
        self.arguments = {**_own_arguments(self.tree), **(words or {})}
        self.names = self._constants()
        self.functions = {n.name for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}
        self.top = {n.name for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.leaves: Leaves = {}
        self.trainer: str | None = None
        self.assigned = _assigned(self.tree)
        self.above = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        for node in calls:
            self._call(node)
        self._data_set([node for node in calls if _last_name(node) == "load_dataset"], calls)
        self._set_later()
        self._environment()
        self.command = _command(ast.get_docstring(self.tree) or "")

    def _constants(self) -> dict[str, Any]:
        constants = {
            f"{holder}.{name}": value
            for holder in _holders(self.tree)
            for name, value in self.arguments.items()
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = ast.unparse(node)
                if name in constants:  # set again after it was parsed
                    constants[name] = Unresolved(name)
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
        name = _last_name(node)
        if name in _CONFIGS:
            self.trainer = _CONFIGS[name]
            for keyword in node.keywords:
                self._keyword(keyword.arg, keyword.value)
        elif name == "LoraConfig":
            self.leaves["use_peft"] = True
            for keyword in node.keywords:
                if keyword.arg in _PEFT:
                    self._leaf(_PEFT[keyword.arg], keyword.value)
                elif keyword.arg == "task_type":
                    continue
                elif keyword.arg != "bias" or _literal(keyword.value, self.names) != "none":
                    self._keyword(keyword.arg, keyword.value, "peft_config.")
        elif name in _TRAINERS:
            self.trainer = _TRAINERS[name]
            for argument, value in zip(_ORDER, node.args, strict=False):
                self._trainer_argument(ast.keyword(argument, value))
            for keyword in node.keywords:
                self._trainer_argument(keyword)
        elif name.endswith("Trainer") and self.trainer is None:
            self.trainer = name
        elif _ROW_CODE.get(name) == MADE_ROWS and isinstance(node.func, ast.Attribute):
            self.leaves[MADE_ROWS] = ast.unparse(node)[:60]

    def _keyword(self, name: str | None, node: ast.expr, prefix: str = "") -> None:
        """An argument, or with `**` those of a mapping."""
        if name is not None:
            self._leaf(f"{prefix}{name}", node)
            return
        value = _literal(node, self.names)
        if isinstance(value, dict):
            for key, inner in value.items():
                self._put(f"{prefix}{key}", inner)
        else:
            self.leaves[f"{prefix}**{ast.unparse(node)[:60]}"] = Unresolved(ast.unparse(node)[:80])

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
        elif keyword.arg in ("model", "processing_class"):
            self._loaded(keyword.arg, keyword.value)
        elif keyword.arg not in _READ_ELSEWHERE:
            self._keyword(keyword.arg, keyword.value)

    def _loaded(self, argument: str, node: ast.expr) -> None:
        """A model or a tokenizer by its name, or by the call of from_pretrained that loads it."""
        value = _literal(node, self.names)
        if isinstance(value, str):
            self.leaves.setdefault("model_name_or_path", value)
            return
        call = self._resolved(node)
        if not isinstance(call, ast.Call) or _last_name(call) != "from_pretrained":
            if argument == "processing_class":
                self.leaves[argument] = Unresolved(ast.unparse(node)[:80])
            return
        named = _literal(call.args[0], self.names) if call.args else None
        if argument == "processing_class":
            if named != self.leaves.get("model_name_or_path", named):
                self.leaves[argument] = Unresolved(str(named))
            return
        if isinstance(named, str):
            self.leaves.setdefault("model_name_or_path", named)
        for keyword in call.keywords:
            plain = _LOADED.get(keyword.arg or "")
            if plain == "dtype":
                text = ast.unparse(keyword.value).strip("'\"").removeprefix("torch.")
                self._put("dtype", text)
            elif plain is not None:
                self._leaf(plain, keyword.value)
            else:
                self._keyword(keyword.arg, keyword.value, "model_init_kwargs.")

    def _resolved(self, node: ast.expr) -> ast.expr:
        """The value of a name that is set once."""
        for _ in range(10):
            if not isinstance(node, ast.Name) or len(self.assigned.get(node.id, [])) != 1:
                break
            node = self.assigned[node.id][0]
        return node

    def _set_later(self) -> None:
        """Fields that a script sets once its configuration is made: `args.beta = 0.1`."""
        configs = {
            name
            for name, values in self.assigned.items()
            if any(isinstance(v, ast.Call) and _last_name(v) in _CONFIGS for v in values)
        }
        stores: list[tuple[int, ast.AST, str, ast.expr]] = []
        for node in ast.walk(self.tree):
            targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
            value: ast.expr | None = node.value if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.AugAssign):
                targets = [node.target]
                value = ast.BinOp(node.target, node.op, node.value)
            line = node.lineno if isinstance(node, ast.stmt | ast.expr) else 0
            if value is not None:
                stores += [
                    (line, node, target.attr, value)
                    for target in targets
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs
                ]
            if isinstance(node, ast.Call) and _last_name(node) == "setattr" and len(node.args) == 3:
                if ast.unparse(node.args[0]) in configs:
                    stores.append((line, node, str(_literal(node.args[1], {})), node.args[2]))
        for _, node, name, value in sorted(stores, key=lambda store: store[0]):
            self.leaves.pop(name, None)
            if self._is_conditional(node):
                self.leaves[name] = Unresolved(ast.unparse(node)[:80])
            else:
                self._leaf(name, value)

    def _environment(self) -> None:
        """Secrets that a script puts into its environment."""
        for node in ast.walk(self.tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                    name = str(_literal(target.slice, self.names))
                    if isinstance(guarded(name, "$"), Secret):
                        self.leaves[f"(environment) {name}"] = Secret(name)

    def _is_conditional(self, node: ast.AST) -> bool:
        while node in self.above:
            node = self.above[node]
            if isinstance(node, _CONDITIONS) and not _is_main(node):
                return True
        return False

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

    def _data_set(self, loads: list[ast.Call], calls: list[ast.Call]) -> None:
        """The data set of training: the one that `train_dataset` comes from, else the first that
        is no test set. Others, and what code does to its rows, are leaves too."""
        for node in calls:
            name = _last_name(node)
            if _ROW_CODE.get(name) == _ROW_CHANGES and not self._is_of_evaluation(node):
                held = self.leaves.get(_ROW_CHANGES)
                text = f".{name}(...)" if isinstance(node.func, ast.Attribute) else f"{name}(...)"
                self.leaves[_ROW_CHANGES] = f"{held}, {text}" if held else text
        loads = [load for load in loads if load.args or load.keywords]
        if not loads:
            return
        training = [load for load in loads if not self._is_of_evaluation(load)]
        chosen = (training or loads)[0]
        self._load(chosen)
        rest = [ast.unparse(load)[:60] for load in training if load is not chosen]
        if rest:
            self.leaves["(other data sets)"] = ", ".join(rest)[:200]

    def _is_of_evaluation(self, node: ast.AST) -> bool:
        """Whether rows are those of an evaluation, by the split or by the variable's name."""
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                split = _literal(keyword.value, self.names) if keyword.arg == "split" else ""
                if str(split).startswith(_EVALUATED):
                    return True
        while node in self.above and not isinstance(node, ast.stmt):
            node = self.above[node]
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        return any(name.startswith(_EVALUATED) for name in names)

    def _load(self, node: ast.Call) -> None:
        keywords = {k.arg or "**": k.value for k in node.keywords}
        first = node.args[0] if node.args else keywords.pop("path", None)
        value = None if first is None else _literal(first, self.names)
        files = _literal(keywords["data_files"], self.names) if "data_files" in keywords else None
        if value in FILES_OF and isinstance(files, str):
            value = files
            del keywords["data_files"]
        if not isinstance(value, str):
            return
        self.leaves["dataset_name"] = value
        second = node.args[1] if len(node.args) > 1 else keywords.pop("name", None)
        if second is not None and isinstance(config := _literal(second, self.names), str):
            self.leaves["dataset_config"] = config
        for name, expression in keywords.items():
            if name == "split":
                split = _literal(expression, self.names)
                split = split[0] if isinstance(split, list) and split else split
                if isinstance(split, str):
                    self.leaves["dataset_train_split"] = split
            else:
                self._leaf(f"load_dataset.{name}", expression)

    def _leaf(self, name: str, node: ast.expr) -> None:
        value = _literal(node, self.names)
        if isinstance(value, dict):
            for key, inner in value.items():
                self._put(f"{name}.{key}", inner)
        else:
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        """A leaf; one that the script sets to two values is open."""
        value = guarded(name, value)
        if name in self.leaves and self.leaves[name] != value:
            value = Unresolved(f"{self.leaves[name]!r} or {value!r}")
        self.leaves[name] = value


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _assigned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """The values that each name is set to, anywhere in a script."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    return assigned


def _is_main(node: ast.AST) -> bool:
    """Whether it is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """A constant; a name or an argument that has one; or what arithmetic, `len`, `or`, `and`,
    equality and `x if y else z` make of them."""
    open_part = Unresolved(ast.unparse(node)[:80])
    match node:
        case ast.Name() | ast.Attribute(value=ast.Name()):
            if ast.unparse(node) in names:
                return names[ast.unparse(node)]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            sides = [_literal(side, names) for side in (node.left, node.right)]
            numbers = all(isinstance(s, int | float) and abs(s) <= MOST_NUMBER for s in sides)
            if numbers and (sides[1] or not isinstance(node.op, ast.Div | ast.FloorDiv)):
                return _ARITHMETIC[type(node.op)](*sides)
        case ast.BoolOp() | ast.IfExp() | ast.Compare():
            decided = _decided(node, names)
            return open_part if isinstance(decided, Unresolved) else decided
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            pairs = {k.arg: _literal(k.value, names) for k in node.keywords}
            return open_part if None in pairs else pairs
        case ast.Call(func=ast.Name(id="len"), args=[counted]):
            value = _literal(counted, names)
            if isinstance(value, str | list | tuple | dict):
                return len(value)
        case _:
            pass
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return open_part


def _decided(node: ast.BoolOp | ast.IfExp | ast.Compare, names: dict[str, Any]) -> Any:
    """The value of a condition; `Unresolved` where a part that decides is."""
    match node:
        case ast.BoolOp():
            value: Any = None
            for part in node.values:
                value = _literal(part, names)
                if isinstance(value, Unresolved) or bool(value) is isinstance(node.op, ast.Or):
                    break
            return value
        case ast.IfExp():
            test = _literal(node.test, names)
            if isinstance(test, Unresolved):
                return test
            return _literal(node.body if test else node.orelse, names)
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as kind]):
            sides = [_literal(side, names) for side in (node.left, *node.comparators)]
            still_open = [side for side in sides if isinstance(side, Unresolved)]
            equal = sides[0] == sides[1]
            return still_open[0] if still_open else equal is isinstance(kind, ast.Eq | ast.Is)
        case _:
            return Unresolved(ast.unparse(node)[:80])


def _own_arguments(tree: ast.Module) -> dict[str, Any]:
    """The arguments of a script's own argparse, by name, with their defaults. One without a value
    here is `Unresolved`."""
    arguments: dict[str, Any] = {}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if not any(_last_name(call) == "ArgumentParser" for call in calls):
        return arguments
    for call in calls:
        keywords = {k.arg: k.value for k in call.keywords if k.arg}
        if _last_name(call) == "set_defaults":
            arguments |= {name: _literal(value, {}) for name, value in keywords.items()}
        if _last_name(call) == "add_argument":
            options = [a.value for a in call.args if isinstance(a, ast.Constant)]
            named = [str(option) for option in options if str(option).startswith("--")] or options
            dest = _literal(keywords["dest"], {}) if "dest" in keywords else (*named, "")[0]
            name = str(dest).lstrip("-").replace("-", "_")
            value = _default(f"--{name.replace('_', '-')}", keywords)
            arguments[name] = Unresolved(f"--{name}") if name in arguments else value
    return arguments


def _default(option: str, keywords: Mapping[str, ast.expr]) -> Any:
    """The value of an option that is not given."""
    action = _literal(keywords["action"], {}) if "action" in keywords else "store"
    if "default" not in keywords:
        needed = "required" in keywords and _literal(keywords["required"], {}) is not False
        switches = {"store_true": False, "store_false": True}
        return Unresolved(f"{option}, which a command gives") if needed else switches.get(action)
    value = _literal(keywords["default"], {})
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    if isinstance(value, str) and kind in ("int", "float"):  # argparse converts a default text
        try:
            return int(value) if kind == "int" else float(value)
        except ValueError:
            return Unresolved(f"{option}: {value}")
    return value


def _holders(tree: ast.Module) -> set[str]:
    """Names that hold what an argparse has read: assigned from `parse_args()`, or from a function
    that returns it; and `args`, as functions call the object that they are passed."""
    parsers = {"parse_args"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            if any(isinstance(v, ast.Call) and _last_name(v) == "parse_args" for v in returned):
                parsers.add(node.name)
    assigned: dict[str, list[bool]] = {"args": []}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            parsed = isinstance(node.value, ast.Call) and _last_name(node.value) in parsers
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(parsed)
    return {name for name, parsed in assigned.items() if all(parsed)}


def _last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


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
