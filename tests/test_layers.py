"""The order of the layers: which module may import which.

The imports are read from the source, inside functions too. A module imports from its own layer
or from a lower one, never in a circle. So nothing below extensions/ imports an extension: it
loads one by name, through utils/extensions.py, when a setting asks for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nanobatch

ROOT = Path(__file__).resolve().parent.parent
CONTROL_PLANE = ("config", "request", "plan", "block_allocator", "scheduler", "engine",
                 "detokenizer", "outputs", "recovery", "metrics")  # fmt: skip
# Lowest first. A name stands for a module of nanobatch/, or for all that is in a folder.
LAYERS = [
    ("utils",),
    (*CONTROL_PLANE, "policies"),
    ("batch", "attention_masks"),
    ("kernels",),
    ("models", "tiny_model"),
    (
        "attention",
        "paged_attention_kernel",
        "sampler",
        "sampling_row",
        "launched",
        "model_runner",
    ),  # fmt: skip
    ("extensions",),
    ("llm",),
    ("simulation",),
    ("bench", "serving"),
    ("check", "viz"),
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
LAYER_OF["bench.py"] = len(LAYERS)  # a script, above the package
# These run where torch is not installed.
TORCH_FREE = (*CONTROL_PLANE, "policies", "simulation", "extensions.async_scheduling",
              "extensions.speculative", "extensions.swap",
              "extensions.parallel_sampling")  # fmt: skip
LARGE = {"torch", "numpy", "triton", "transformers"}
# These import modules whose names they are given.
IMPORT_BY_NAME = {"", "utils.extensions", "bench.cli", "check", "viz.__main__"}


class Import(NamedTuple):
    """`module` imports `target`: a module of this package, or the top name of another."""

    module: str
    target: str
    is_at_start: bool  # outside of functions: runs when the module is imported


def read(root: Path = ROOT) -> dict[str, str]:
    """Sources by module name: "scheduler", "models.loader", "bench.py"."""
    sources = {"bench.py": (root / "bench.py").read_text()}
    for path in sorted((root / "nanobatch").rglob("*.py")):
        parts = path.relative_to(root / "nanobatch").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


def imports_of(sources: dict[str, str]) -> list[Import]:
    """Every import in the sources, each name of the package resolved to a module of it."""
    packages = {name.rpartition(".")[0] for name in sources} | {""}
    found = []
    for module, source in sources.items():
        tree = ast.parse(source)
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for node in ast.walk(function)
        }
        package = module if module in packages else module.rpartition(".")[0]
        for node in ast.walk(tree):
            for name in named_by(node, package):
                target = resolved(name, sources)
                if target != module:
                    found.append(Import(module, target, id(node) not in inside))
    return found


def named_by(node: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that an import statement in a module of this package names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        start = node.module or ""
        if node.level > 0:
            parts = ["nanobatch", *filter(None, package.split("."))]
            parts = parts[: len(parts) - node.level + 1]
            start = ".".join([*parts, start]).strip(".")
        yield from (f"{start}.{alias.name}" for alias in node.names)


def resolved(name: str, sources: dict[str, str]) -> str:
    """The module behind a dotted name. `nanobatch.Scheduler` is the module "scheduler"."""
    first, _, rest = name.partition(".")
    if first != "nanobatch":
        return first
    if rest in nanobatch._HOME_OF:
        return nanobatch._HOME_OF[rest]
    while rest and rest not in sources:
        rest = rest.rpartition(".")[0]  # what follows is a name inside of a module
    return rest


def layer_of(module: str) -> int | None:
    """Its place in the order; None for the package itself, minimal.py, and what is not ours."""
    return LAYER_OF.get(module if module == "bench.py" else module.partition(".")[0])


def is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


# ------------------------------------------------------------------------------- the rules


def without_a_layer(sources: dict[str, str]) -> set[str]:
    """Every module has a layer, but for the package itself and minimal.py."""
    return {name for name in sources if layer_of(name) is None and name not in ("", "minimal")}


def upward(imports: list[Import]) -> set[str]:
    """A module imports from its own layer or from a lower one."""
    layers = [(layer_of(i.module), layer_of(i.target), i) for i in imports]
    return {
        f"{i.module} -> {i.target}"
        for own, other, i in layers
        if own is not None and other is not None and other > own
    }


def by_name(sources: dict[str, str]) -> set[str]:
    """Imports that this test cannot read are made in a few known places only."""
    return {
        name
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("import_module", "__import__"))
        and name not in IMPORT_BY_NAME
    }


def minimal_is_not_alone(imports: list[Import], sources: dict[str, str]) -> set[str]:
    """minimal.py stands alone: it imports nothing of the package, nothing imports it."""
    return {
        f"{i.module} -> {i.target}"
        for i in imports
        if i.target == "minimal" or (i.module == "minimal" and i.target in sources)
    }


def needs_torch(imports: list[Import]) -> set[str]:
    """Modules that must import without torch, and that need it: themselves, in a function too,
    or when they are imported, by way of other modules of the package."""
    at_start: dict[str, set[str]] = {}
    for i in imports:
        if i.is_at_start:
            at_start.setdefault(i.module, set()).add(i.target)
    found = set()
    for module in {i.module for i in imports if is_in(i.module, TORCH_FREE)}:
        reached, todo = set(), [module]
        while todo:
            for target in at_start.get(todo.pop(), set()) - reached:
                reached.add(target)
                todo.append(target)
        own = {i.target for i in imports if i.module == module}
        found |= {f"{module} -> {name}" for name in LARGE & (reached | own)}
    return found


def circles(imports: list[Import]) -> set[str]:
    """Modules that import each other in a circle, each circle once."""
    targets: dict[str, set[str]] = {}
    for i in imports:
        targets.setdefault(i.module, set()).add(i.target)
    found, done = set(), set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circle = path[path.index(module) :]
            first = circle.index(min(circle))
            found.add(" -> ".join([*circle[first:], *circle[: first + 1]]))
        elif module not in done:
            for target in sorted(targets.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(targets):
        visit(module, [])
    return found


def broken(sources: dict[str, str]) -> dict[str, set[str]]:
    """What breaks each rule, by the rule's name."""
    imports = imports_of(sources)
    return {
        "without a layer": without_a_layer(sources),
        "upward": upward(imports),
        "by name": by_name(sources),
        "minimal.py is not alone": minimal_is_not_alone(imports, sources),
        "needs torch": needs_torch(imports),
        "circle": circles(imports),
    }


# ------------------------------------------------------------------------------- the tests

FOUND = broken(read())


@pytest.mark.parametrize("rule", FOUND)
def test_no_import_breaks_a_rule(rule):
    assert FOUND[rule] == set(), "imports that the design forbids"


MADE_UP = {
    "a module of its own": ("news", "", "without a layer", "news"),
    "plain": ("scheduler", "import nanobatch.llm", "upward", "scheduler -> llm"),
    "a name in a module": (
        "batch", "from nanobatch.sampler import sample", "upward", "batch -> sampler"
    ),
    "a module of a folder": (
        "kernels.ops", "from nanobatch.extensions import swap", "upward",
        "kernels.ops -> extensions.swap",
    ),
    "what the package hands on": (
        "config", "from nanobatch import FCFS, LLM", "upward", "config -> llm"
    ),
    "relative": (
        "models.loader", "from ..extensions.swap import Swap", "upward",
        "models.loader -> extensions.swap",
    ),
    "relative, of a package": (
        "models", "from ..llm import LLM", "upward", "models -> llm"
    ),
    "inside a function": (
        "attention", "def f():\n    from nanobatch import viz", "upward", "attention -> viz"
    ),
    "for types only": (
        "plan", "if TYPE_CHECKING:\n    from nanobatch.batch import Row", "upward",
        "plan -> batch",
    ),
    "by name": ("engine", "importlib.import_module('nanobatch.llm')", "by name", "engine"),
    "minimal.py imports": (
        "minimal", "from nanobatch.utils import arithmetic", "minimal.py is not alone",
        "minimal -> utils.arithmetic",
    ),
    "minimal.py is imported": (
        "llm", "from nanobatch import minimal", "minimal.py is not alone", "llm -> minimal"
    ),
    "torch in a policy": (
        "policies.ordering", "import torch.nn", "needs torch", "policies.ordering -> torch"
    ),
    "torch in a function": (
        "simulation.router", "def f():\n    import torch", "needs torch",
        "simulation.router -> torch",
    ),
    "torch by way of another module": (
        "utils.arithmetic", "import torch", "needs torch", "scheduler -> torch"
    ),
    "a circle": (
        "utils.checks", "from nanobatch.utils import extensions", "circle",
        "utils.checks -> utils.extensions -> utils.checks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE_UP)
def test_each_rule_can_fail(case):
    """Sources with one more line break exactly that rule, and by that import."""
    module, line, rule, found = MADE_UP[case]
    sources = {
        "": "",
        "minimal": "import torch",
        "models": "",
        "models.loader": "import torch",
        "scheduler": "from nanobatch.utils import arithmetic",
        "utils": "",
        "utils.arithmetic": "",
        "utils.extensions": "import importlib\nfrom nanobatch.utils.checks import check_int",
        **dict.fromkeys(("extensions", "extensions.swap", "llm", "batch", "sampler"), ""),
        **dict.fromkeys(("config", "policies.ordering", "viz", "utils.checks"), ""),
    }
    assert broken(sources) == dict.fromkeys(FOUND, set())
    sources[module] = f"{sources.get(module, '')}\n{line}"
    assert {name: what for name, what in broken(sources).items() if what} == {rule: {found}}


def test_an_import_deep_in_a_function_does_not_reach_those_who_import_the_module():
    sources = {
        "utils.device": "def f():\n    import torch",
        "config": "import nanobatch.utils.device",
    }
    assert needs_torch(imports_of(sources)) == set()
