"""Fill the blocks ``<!-- NAME [FILES] -->`` ... ``<!-- end -->`` of docs from the code: ``write``, ``check``.

Errors and routes are read from the syntax tree: it has every ``remedy=``, and nothing heavy is imported.
"""

import ast
import json
import re
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import rollmatch
from rollmatch.cli.main import make_parser
from rollmatch.config import make
from rollmatch.config.findings import _CODES
from rollmatch.config.layers import merge, parse_overrides
from rollmatch.config.schema import RunConfig
from rollmatch.errors import ErrorList
from rollmatch.server.failures import REFUSALS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PAGES = ROOT / "impl" / "rollmatch", ROOT / "docs" / "reference"
SEE_MESSAGE = "Follow the message: it names the value and the place."
OTHERWISE = dict.fromkeys(("LearnError", "TargetError"), "Internal check. Report it with `ROLLMATCH_TRACEBACK=1`.")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNSTATED = 2**63
"""Bound of every integer of a body."""
Tree = Mapping[str, Any]
Classes = Mapping[str, ast.ClassDef]
Assigned = Mapping[str, list[ast.expr]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells lose line breaks and escape pipes."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def keys() -> Iterator[str]:
    """Every key of the YAML, a table per section."""
    schema = RunConfig.model_json_schema(mode="validation")
    return _sections("", schema, schema["$defs"])


def _sections(path: str, section: Tree, parts: Tree) -> Iterator[str]:
    rows, below = [], []
    for name, about in section["properties"].items():
        key = f"{path}.{name}".lstrip(".")
        if (inner := _section_in(about, parts)) is not None:
            below.append((key, inner))
        items = [_section_in(choice.get("items") or {}, parts) for choice in (about, *about.get("anyOf", ()))]
        below += [(f"{key}[]", item) for item in items if item is not None]
        optional = [_section_in(choice, parts) for choice in about.get("anyOf", ())]
        below += [(key, found) for found in optional if found is not None]
        if inner is None:
            text, _, unit = about["description"].replace("\n", " ").partition(" Unit: ")
            default = "required" if name in section.get("required", ()) else _value(about.get("default", {}))
            rows.append((f"`{name}`", _type(about, parts), default, unit.rstrip("."), text))
    if rows:
        yield f"## {f'`{path}`' if path else 'Top level'}\n\n{section.get('description', '')}"
        yield table(("Key", "Type", "Default", "Unit", "Meaning"), rows)
    for key, inner in below:
        yield from _sections(key, inner, parts)


def _section_in(about: Tree, parts: Tree) -> Tree | None:
    part = parts.get(about.get("$ref", "").rpartition("/")[2], {})
    return part if "properties" in part else None


def _type(about: Tree, parts: Tree) -> str:
    """A JSON schema in a few words, such as ``integer >= 1 or null``; a part by its name where there are none."""
    if "$ref" in about and not parts:
        return f"`{about['$ref'].rpartition('/')[2]}`"
    if about.get("format") == "binary":
        return "bytes"
    if choices := about.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(choice, parts) for choice in choices))
    if "enum" in about or "const" in about:
        return ", ".join(_value(value) for value in about.get("enum", [about.get("const")]))
    if places := about.get("prefixItems"):
        return f"({', '.join(_type(place, parts) for place in places)})"
    if about.get("type") == "array":
        return f"list of {_type(about['items'], parts)}"
    kind = {"object": "mapping", "boolean": "true or false"}.get(about.get("type", "object"))
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    stated = {name: about[name] for name in limits if abs(about.get(name, UNSTATED)) < UNSTATED}
    bounds = ", ".join(f"{limits[name]} {_number(value)}" for name, value in stated.items())
    return f"{kind or about['type']} {bounds}".rstrip()


def _number(value: float) -> str:
    return "2^31" if value == 2**31 else f"{value:g}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return f"`{text}`" if len(text) < 40 else "see `rollmatch check`"


def commands(parser: ArgumentParser | None = None) -> Iterator[str]:
    """Every command with its arguments, commands of commands included."""
    parser = parser or make_parser()
    choices = next((action for action in parser._actions if isinstance(action, _SubParsersAction)), None)
    for name, about in zip(choices.choices, choices._choices_actions, strict=True) if choices else ():
        command, rows = choices.choices[name], []
        for action in command._actions[1:]:  # without --help
            text, default = action.help or "", "" if action.default in (None, False, []) else f"`{action.default}`"
            value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
            value = f" {{{','.join(map(str, action.choices))}}}" if action.choices else value
            shown = (", ".join(action.option_strings) or action.metavar or action.dest) + value
            rows.append((f"`{shown}`", "" if "default: " in text else default, text))
        yield f"## `{command.prog}`\n\n{str(about.help)[0].upper()}{str(about.help)[1:]}."
        yield table(("Argument", "Default", "Meaning"), rows)
        yield from commands(command)


def errors() -> Iterator[str]:
    """Every error code once: what is wrong and what to do."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    rows: dict[str, dict[str, tuple[list[str], list[str]]]] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    for name, node in classes.items():
        branch = branch_of(name, classes)
        if (code := code_of(node)) and branch not in ("", name):
            rows[branch][code][0].append(first_paragraph(node))
    for code, remedy in dict([*_CODES.values(), ("wrong-type", "Write a value of that type.")]).items():
        rows["ConfigError"][code][0].append("Missing, or not a value of this key.")
        rows["ConfigError"][code][1].append(remedy)
    for code, (status, rule) in REFUSALS.items():
        rows["RolloutError"][code][0].append(f"{rule} HTTP status {status}.")
    for name, arguments in error_calls(trees, classes):
        branch = branch_of(name, classes)
        for code in arguments["code"] or [code_of(classes[name])]:
            if branch and code != code_of(classes[branch]):
                key = "".join(f"`{text}`: " for text in arguments["key"] if "..." not in text)
                wanted = arguments["code"] and code not in REFUSALS
                rows[branch][code][0].extend(key + text for text in arguments["problem"] if wanted)
                rows[branch][code][1].extend(arguments["remedy"])
    for branch, codes in sorted(rows.items()):
        lines, otherwise = [], OTHERWISE.get(branch, SEE_MESSAGE)
        for code, cells in sorted(codes.items()):
            wrong, todo = (list(dict.fromkeys(cell)) for cell in cells)
            lines.append((f"`{code}`", "; ".join(wrong) or SEE_MESSAGE, " ".join(todo) or otherwise))
        yield f"## {branch}\n\n{first_paragraph(classes[branch])}"
        yield table(("Code", "What is wrong", "What to do"), lines)


def error_calls(trees: list[ast.Module], classes: Classes) -> Iterator[tuple[str, Mapping[str, list[str]]]]:
    """Class of each error that the code makes, and the texts of its arguments."""
    constants = assigned(part for tree in trees for part in tree.body)
    passed: dict[str, dict[str, list[ast.expr]]] = defaultdict(lambda: defaultdict(list))
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for word in call.keywords:
            passed[ast.unparse(call.func)][word.arg or ""].append(word.value)
    for function in (node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        local = assigned(ast.walk(function))
        inside = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        calls = [call for call in inside if ast.unparse(call.func) in classes]
        for call in calls:
            names = {**constants, **passed[function.name], **local}
            if len(calls) > 1:  # each branch may set a name again: the last value above the call is meant
                above = {name: [each for each in known if each.lineno <= call.lineno] for name, known in local.items()}
                names |= {name: known[-1:] for name, known in above.items() if known}
            given = {word.arg: texts_of(word.value, names) for word in call.keywords if word.arg}
            given["problem"] = [text for part in call.args[:1] for text in texts_of(part, names)]
            yield ast.unparse(call.func), defaultdict(list, given)


def texts_of(value: ast.expr, names: Assigned) -> list[str]:
    """The texts that an expression can be; computed parts become ``...``, unknown expressions nothing."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) and value.value else []
    if isinstance(value, ast.FormattedValue):
        return known if len(known := texts_of(value.value, names)) == 1 else ["..."]
    if isinstance(value, ast.JoinedStr):
        return ["".join(text for part in value.values for text in texts_of(part, names))]
    if isinstance(value, ast.IfExp):
        return [*texts_of(value.body, names), *texts_of(value.orelse, names)]
    if not isinstance(value, ast.Name):
        return []
    others = {name: values for name, values in names.items() if name != value.id}  # a name may be made from itself
    return [text for each in names.get(value.id, ()) for text in texts_of(each, others)]


def assigned(nodes: Iterable[ast.AST]) -> Assigned:
    """All expressions that these statements assign to each name, tuples unpacked."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, part in zip(target.elts, value.elts, strict=False) if both else [(target, value)]:
                if isinstance(name, ast.Name):
                    found[name.id].append(part)
    return found


def branch_of(name: str, classes: Classes) -> str:
    """The class right below ``RollmatchError`` that an error descends from; empty for anything else."""
    bases = [ast.unparse(base) for base in classes[name].bases] if name in classes else []
    return name if "RollmatchError" in bases else next((branch_of(b, classes) for b in bases if b in classes), "")


def code_of(node: ast.ClassDef) -> str:
    """The error code that a class defines; empty for none."""
    return next((str(value.value) for value in assigned(node.body)["code"] if isinstance(value, ast.Constant)), "")


def first_paragraph(node: ast.ClassDef) -> str:
    """The first paragraph of a docstring, as Markdown."""
    text = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def routes(files: str) -> Iterator[str]:
    """The routes that are defined in some files of the package."""
    rows = [row for file in sorted(PACKAGE.glob(files)) for row in routes_of(file)]
    yield table(("Route", "Fields of the body (optional ones in italics)"), rows)


def routes_of(file: Path) -> Iterator[tuple[str, str]]:
    """Method and path of each route in a module, and the fields of its body."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    prefix = re.search(r'APIRouter\(prefix="([^"]+)"', ast.unparse(tree).replace("'", '"'))
    module = import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    for handler in [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]:
        marks = [
            re.fullmatch(r"(?:router|app)\.(get|post)\('(.+)'\)", ast.unparse(mark)) for mark in handler.decorator_list
        ]
        body = re.search(r"read_body\(request, (\w+)", ast.unparse(handler))
        fields = getattr(module, body[1]).model_fields.items() if body else ()
        shown = [f"`{name}`" if about.is_required() else f"*`{name}`*" for name, about in fields]
        for mark in filter(None, marks):
            yield f"`{mark[1].upper()} {prefix[1] if prefix else ''}{mark[2]}`", ", ".join(shown)


def messages(file: str, *names: str) -> Iterator[str]:
    """Messages of a module: each field with its type, its default and what its docstring says."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    module = import_module(".".join(("rollmatch", *Path(file).with_suffix("").parts)))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name in names:
        texts = notes_of(classes[name])
        schema = getattr(module, name).model_json_schema(mode="validation")
        rows = [
            (f"`{field}`", _type(about, {}), _default(field, about, schema), texts.get(field, ""))
            for field, about in schema["properties"].items()
            if field in assigned_in(classes[name]) and about.get("type") != "null"
        ]
        neutral = [f"`{field}`" for field, about in schema["properties"].items() if about.get("type") == "null"]
        yield f"**`{name}`**: {first_paragraph(classes[name])}"
        yield table(("Field", "Type", "Default", "Meaning"), rows)
        if neutral:
            yield f"Accepted where they change nothing (null, false, 0, empty; factors also 1): {', '.join(neutral)}."


def limits(*places: str) -> Iterator[str]:
    """Constants of modules, each as ``file:NAME``: value and what the text below it says."""
    rows = []
    for file, _, name in (place.partition(":") for place in places):
        module = ".".join(("rollmatch", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
        source = (Path(rollmatch.__file__).parent / file).read_text(encoding="utf-8")
        for node, text in pairwise(ast.parse(source).body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(text, ast.Expr):
                rows.append((f"`{module}.{name}`", f"`{ast.unparse(node.value)}`", ast.literal_eval(text.value)))
    assert len(rows) == len(places), "a constant is gone, or nothing stands below it"
    yield table(("Name", "Value", "Meaning"), rows)


def _default(field: str, about: Tree, schema: Tree) -> str:
    value = about.get("default", {})
    own = "those of its fields" if isinstance(value, dict) and value else _value(value)
    return "required" if field in schema.get("required", ()) else own


def assigned_in(node: ast.ClassDef) -> list[str]:
    """Names of a class's own fields."""
    return [
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]


def notes_of(node: ast.ClassDef) -> dict[str, str]:
    """The text below each field of a class."""
    return {
        field.target.id: str(text.value.value)
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


PLAIN = {
    "model": {"model": "model"},
    "custom": {"train_jsonl": "train.jsonl"},
    "global_max_length": 2048,
    "training": {"output_dir": "run", "packing": False},
}
"""What the configurations of ``combinations`` have in common."""
ROLLOUT, VARIANT = "custom.extra.rollout_matching", "custom.trainer_variant"
PLAYED = ("custom.extra.environment.name=module:Class",)
PAID = ("custom.extra.grpo.rewards=[{function: module:reward}]",)
TAUGHT = ("custom.extra.distill.teachers=[{model: teacher}]",)
OBJECTIVES = {
    "`sft`": (f"{VARIANT}=sft",),
    "`rollout_matching_sft`": (f"{VARIANT}=rollout_matching_sft",),
    "`rollout_matching_sft`, `packing`": (
        *(f"{VARIANT}=rollout_matching_sft", "training.packing=true"),
        f"{ROLLOUT}.max_staleness=2",
    ),
    "`grpo`": (f"{VARIANT}=grpo", *PAID),
    "`grpo`, `packing`": (f"{VARIANT}=grpo", *PAID, "training.packing=true"),
    "`grpo`, environment": (f"{VARIANT}=grpo", *PLAYED),
    "`distill`": (f"{VARIANT}=distill", *TAUGHT),
    "`vineppo`": (f"{VARIANT}=vineppo", *PAID),
    "`vineppo`, environment": (f"{VARIANT}=vineppo", *PLAYED),
    "`vineppo_mcts`": (f"{VARIANT}=vineppo_mcts", *PAID),
}
SERVERS = (f"{ROLLOUT}.vllm.mode=server", f"{ROLLOUT}.vllm.server.group_port=51216")
LISTED = f"{ROLLOUT}.vllm.server.base_url=http://127.0.0.1:8000"
BACKENDS = {
    "`hf`": (f"{ROLLOUT}.rollout_backend=hf",),
    "colocated": (),
    "servers": (*SERVERS, LISTED),
    "`servers_file`": (SERVERS[0], f"{ROLLOUT}.vllm.server.servers_file=servers.json"),
}
AHEAD = (f"{ROLLOUT}.overlap=ahead",)
KEEP = (*AHEAD, f"{ROLLOUT}.vllm.sync.in_flight=keep")
OVERLAPS = {
    "`off`": (),
    "`ahead`": AHEAD,
    "`ahead`, `in_flight: keep`": KEEP,
    "`ahead`, `keep`, `late_windows: 1`": (*KEEP, f"{ROLLOUT}.late_windows=1", f"{ROLLOUT}.max_staleness=3"),
}


def combinations() -> Iterator[str]:
    """Which backends ``check`` accepts for an objective and an overlap, and by which codes it refuses others."""
    said = {
        (objective, overlap, backend): _refusal((*own, *where, *how))
        for objective, own in OBJECTIVES.items()
        for overlap, how in OVERLAPS.items()
        for backend, where in BACKENDS.items()
    }

    def accepted(objective: str, overlap: str) -> list[str]:
        return [backend for backend in BACKENDS if not said[objective, overlap, backend]]

    rows = [
        (one, *(", ".join(accepted(one, how)) or f"no: `{said[one, how, 'servers']}`" for how in OVERLAPS))
        for one in OBJECTIVES
    ]
    yield table(("Objective", *OVERLAPS), rows)
    yield "Where another backend is accepted, one that is not named is refused with:"
    rows = [
        (backend, *(", ".join(_codes(said[one, how, backend] for one in OBJECTIVES if accepted(one, how)))
                    for how in OVERLAPS))
        for backend in BACKENDS
    ]  # fmt: skip
    yield table(("Backend", *OVERLAPS), rows)


def _codes(said: Iterable[str]) -> list[str]:
    return [f"`{code}`" for code in dict.fromkeys(said) if code]


def _refusal(overrides: Sequence[str]) -> str:
    """The first code; empty where the configuration is accepted."""
    try:
        make(merge(PLAIN, parse_overrides(overrides)))
    except ErrorList as refused:
        return refused.errors[0].code
    return ""


BLOCKS = {
    "combinations": combinations,
    "keys": keys,
    "commands": commands,
    "errors": errors,
    "routes": routes,
    "messages": messages,
    "limits": limits,
}


def filled(page: str) -> str:
    """A page with all its blocks made again."""
    pattern = rf"<!-- ((?:{'|'.join(BLOCKS)})\b.*?) -->.*?<!-- end -->"
    return re.sub(pattern, lambda found: block(found[1]), page, flags=re.DOTALL)


@cache
def block(words: str) -> str:
    """The block of a name and its arguments; the code does not change while this runs."""
    name, *arguments = words.split()
    return "\n\n".join([f"<!-- {words} -->", *BLOCKS[name](*arguments), "<!-- end -->"])


def main(mode: str) -> int:
    """Write the stale pages, or only name them."""
    pages = [*sorted(PAGES.glob("*.md")), *sorted((PAGES.parent / "concepts").glob("*.md"))]
    fresh = {path: filled(path.read_text(encoding="utf-8")) for path in pages}
    stale = [path for path, text in fresh.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'written' if mode == 'write' else 'stale; run make reference'}")
        path.write_text(fresh[path], encoding="utf-8") if mode == "write" else None
    return int(bool(stale) and mode != "write")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
