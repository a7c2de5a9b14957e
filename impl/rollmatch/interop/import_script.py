"""What a script of TRL says without being run: arguments of GRPOConfig, GRPOTrainer, LoraConfig and the data set."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rollmatch.errors import ConfigError
from rollmatch.interop.import_tables import TRL_REWARDS

NOT_READ = ("self", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config")
"""Arguments of GRPOTrainer that other calls say."""
ADAPTERS_READ = {"r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora"}
ADAPTERS: dict[str, dict[str, object]] = {
    "LoraConfig": {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "get_peft_model": {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0},
}
"""Calls that make adapters -> their defaults: peft's, and Unsloth's."""
PEFT_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
MODEL_NAMES = ("pretrained_model_name_or_path", "model_name", "model_name_or_path")
"""What from_pretrained(...) calls its first argument."""
OF_MODEL = {name: name for name in ("dtype", "torch_dtype", "attn_implementation", "load_in_4bit", "load_in_8bit")}
OF_MODEL |= {"revision": "model_revision"}
OTHER_TRAINERS = {
    "AsyncGRPOConfig": "Write GRPOConfig(...); rollout.overlap: ahead then learns while servers generate.",
    "RLOOConfig": "Write GRPOConfig(...), with grpo.baseline: leave_one_out and grpo.scale_rewards: none in our keys.",
    "SFTConfig": "docs/guides/grpo.md has a configuration of SFT.",
    "GKDConfig": "docs/guides/distill.md has a configuration.",
    "DPOConfig": "It learns from given pairs, which is not done here.",
    "OnlineDPOConfig": "It learns from pairs, which is not done here; GRPO learns from the same rewards.",
}
"""Other configurations of TRL -> what to write."""
OPERATORS: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


ROW_MAKERS = ("map", "filter", "select", "train_test_split", "concatenate_datasets", "rename_column", "rename_columns")


class Unread(str):
    """Why a setting is not taken over."""


def read_script(path: Path, *, is_called: bool) -> dict[str, object]:
    """Settings of a script under TRL's names; what only its run would say is ``Unread``.

    ``is_called``: the command line stands for GRPOConfig(...). Errors: ``import-source-unreadable``.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        problem, remedy = f"{path}: {error}", "Give a readable script."
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy) from error
    script, fields = _Script(tree, path.stem), dict[str, object]()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = sorted(calls, key=lambda node: (node.lineno, node.end_col_offset or 0))
    for call in calls:
        name, named = _name_of(call), {one.arg: one.value for one in call.keywords if one.arg is not None}
        if name == "GRPOConfig":
            is_called = True
            fields |= {key: script.value(value) for key, value in named.items()}
        elif name == "GRPOTrainer":
            fields |= script.trainer(dict(zip(("model", "reward_funcs"), call.args)) | named)
        elif name == "LoraConfig" or (name == "get_peft_model" and "r" in named):
            given = {key: script.value(value) for key, value in named.items()}
            known = given if name == "LoraConfig" else {key: given[key] for key in given.keys() & ADAPTERS_READ}
            fields |= {PEFT_NAMES.get(key, key): value for key, value in (ADAPTERS[name] | known).items()}
            fields["use_peft"] = True
    if not is_called:
        others = [_name_of(call) for call in calls if _name_of(call) in OTHER_TRAINERS]
        problem, remedy = f"{path} has no GRPOConfig(...)", "Give one that makes it, or its command line after --."
        if others:
            problem, remedy = f"{path} makes {others[0]}(...), and only GRPO is imported", OTHER_TRAINERS[others[0]]
        raise ConfigError(problem, code="import-source-unreadable", key="SOURCE", remedy=remedy)
    return _datasets_of(script, calls) | fields


def _datasets_of(script: "_Script", calls: list[ast.Call]) -> dict[str, object]:
    """The data sets that the trainer gets, or else the first one and the next; rows that are made are not seen."""
    loads = [call for call in calls if _name_of(call) == "load_dataset"]
    named = {one.arg: one.value for call in calls if _name_of(call) == "GRPOTrainer" for one in call.keywords}
    found = {
        kind: [*script.calls(named[f"{kind}_dataset"])] for kind in ("train", "eval") if f"{kind}_dataset" in named
    }
    makers = [_name_of(call) for call in found.get("train", calls) if _name_of(call) in ROW_MAKERS]
    if makers and loads:
        reason = f"rows that {makers[0]}() makes are not seen: write them with to_json, and name that file in "
        return {"train_dataset": Unread(f"{reason}custom.train_jsonl")}
    traced = {kind: next((call for call in made if call in loads), None) for kind, made in found.items()}
    train, test = traced.get("train"), traced.get("eval")
    if train is None:
        train, test = (*loads, None, None)[:2]
    fields = {} if train is None else script.dataset(train)
    split = {} if test is None or test is train else script.dataset(test)
    if "dataset_train_split" in split:
        fields["dataset_test_split"] = split["dataset_train_split"]
    return fields


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


class _Script:
    """Names of a script, and what is assigned to them."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        self.module = module
        self.values: dict[str, list[ast.expr]] = {}
        """Name -> what is assigned to it, in order; of several names at once, all of it."""
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        self.imported = {one.asname or one.name: f"{node.module}.{one.name}" for node in imports for one in node.names}
        bound = Counter[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += 1
            elif isinstance(node, ast.arg):
                bound[node.arg] += 1
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.values.setdefault(name.id, []).append(node.value)
        single = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
        pairs = [(node.targets[0], node.value) for node in single]
        self.constants = {name.id: value for name, value in pairs if isinstance(name, ast.Name) and bound[name.id] == 1}
        self.trains_at_import = any(_name_of(call) == "GRPOTrainer" for call in _calls_at_import(tree))

    def value(self, node: ast.expr) -> object:
        """What an expression of plain values is, or ``Unread``."""
        try:
            return self._value(node)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            return Unread(f"{ast.unparse(node)} is no plain value")

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return self._value(self.constants[node.id])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            return node.attr
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Subscript):
            holder: object = self._value(node.value)
            return holder[self._value(node.slice)]  # type: ignore[index]
        if isinstance(node, ast.List):
            return [self._value(one) for one in node.elts]
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values]
            return "".join(str(self._value(one)) for one in parts)
        value = ast.literal_eval(node)
        if value is ...:
            raise ValueError("documentation leaves it out")
        return value

    def trainer(self, named: Mapping[str, ast.expr]) -> dict[str, object]:
        """What the arguments of GRPOTrainer say."""
        fields = {key: self.value(value) for key, value in named.items() if key not in NOT_READ}
        if "model" in fields:
            fields = self._model(named["model"], fields.pop("model")) | fields
        if "reward_funcs" in named:
            fields["reward_funcs"] = self._functions(named["reward_funcs"])
            if self.trains_at_import and f"'{self.module}_rewards." in str(fields["reward_funcs"]):
                reason = f"importing it would train: move its reward functions to {self.module}_rewards.py"
                fields[f"{self.module}.py"] = Unread(reason)
        return fields

    def _model(self, node: ast.expr, value: object) -> dict[str, object]:
        """A name, or what from_pretrained(...) loads, with its arguments."""
        loads = [call for call in self.calls(node) if _name_of(call) == "from_pretrained"]
        if not isinstance(value, Unread) or not loads:
            return {"model_name_or_path": value}
        named = {one.arg: one.value for one in loads[0].keywords if one.arg is not None}
        first = next((named[name] for name in MODEL_NAMES if name in named), next(iter(loads[0].args), node))
        read = {OF_MODEL[name]: self.value(one) for name, one in named.items() if name in OF_MODEL}
        return read | {"model_name_or_path": self.value(first)}

    def dataset(self, call: ast.Call) -> dict[str, object]:
        """What ``load_dataset(...)`` reads, under TRL's names; of several splits the first two."""
        named = dict(zip(("path", "name"), call.args)) | {one.arg: one.value for one in call.keywords if one.arg}
        read = {name: self.value(value) for name, value in named.items()}
        part = read.get("data_files", read.get("split"))
        first, second = (*part, None, None)[:2] if isinstance(part, list) else (part, None)
        found = {"dataset_name": read.get("path"), "dataset_config": read.get("name")}
        found |= {"dataset_train_split": first, "dataset_test_split": second}
        return {name: value for name, value in found.items() if value is not None}

    def calls(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> Iterator[ast.Call]:
        """Calls in an expression, in what its names were assigned, and in the functions that it calls."""
        for one in ast.walk(node):
            if isinstance(one, ast.Call):
                yield one
            elif isinstance(one, ast.Name) and one.id not in seen:
                called = [self.functions[one.id]] if one.id in self.functions else []
                for inner in (*self.values.get(one.id, ()), *called):
                    yield from self.calls(inner, seen | {one.id})

    def _functions(self, node: ast.expr) -> object:
        """Names of functions of this script or of others, which is how rewards are named."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self._functions(one) for one in node.elts]
        if isinstance(node, ast.Name):
            return self._function(node.id)
        return ast.literal_eval(node) if isinstance(node, ast.Constant) else ast.unparse(node)

    def _function(self, name: str) -> str:
        if name in TRL_REWARDS:
            return name
        own = f"{self.module}_rewards" if self.trains_at_import else self.module
        return self.imported.get(name, f"{own}.{name}")


def _calls_at_import(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that importing the script makes: outside functions, and not below ``if __name__ == "__main__"``."""
    for node in tree.body:
        is_guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not is_guarded and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from (one for one in ast.walk(node) if isinstance(one, ast.Call))
