"""The house: imports point down, torch and Hydra stay in their rooms, and names say what things are."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "perfexp"

#: Modules and rooms by floor; a module may import from its own floor or from below.
FLOORS = {
    5: (
        "__main__",
        "main",
        "naming",
        "overrides",
        "campaign",
        "dry_run",
        "job",
        "rounds",
        "resume",
        "stored",
        "worker",
        "commands",
        "opening",
        "preparation",
        "first_prediction",
        "timed",
        "rank",
    ),
    4: ("config", "validation", "settings", "explain", "usage"),
    3: (
        "run",
        "times",
        "training",
        "dissect",
        "verdicts",
        "rivals",
        "unqueued",
        "launch",
        "process",
        "survey",
        "sinks",
    ),
    2: (
        "models",
        "data",
        "algorithms",
        "kernels",
        "modes",
        "probes",
        "work",
        "layers",
        "profilers",
        "ranks",
        "estimate",
    ),
    1: ("devices", "meters", "stopping", "environment", "repository", "machine", "diagnosis", "sweep"),
    0: (
        "record",
        "sweep_record",
        "distributions",
        "roofline",
        "speed",
        "stats",
        "units",
        "paths",
        "foreign",
        "credentials",
        "errors",
        "gpus",
        "scaling",
        "summary",
        "metrics",
        "doubts",
        "disturbances",
        "interrupts",
        "streams",
        "unexpected",
        "lifeline",
        "locks",
        "kept",
        "events",
    ),
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}

#: Who may import which foreign package at any level of nesting.
ONLY = {
    "torch": {"models", "data", "algorithms", "kernels", "probes", "devices", "work", "layers", "profilers", "ranks"},
    "triton": {"kernels"},
    "torchvision": {"models", "data"},
    "hydra": {"main", "config", "worker", "explain", "overrides"},
    "omegaconf": {"main", "config", "settings", "worker", "explain"},
    "mlflow": {"sinks", "commands"},
    "matplotlib": {"sinks"},
    "pandas": {"sinks", "commands"},
    "pyarrow": {"sinks", "commands"},
    "rich": {"sinks", "commands"},
    "typer": {"commands"},
}
TORCH_FREE = (
    "models/__init__",
    "models/fake",
    "models/mmseg_names",
    "data/__init__",
    "data/synthetic",
    "devices/__init__",
    "devices/cpu",
    "devices/fake",
    "devices/auto",
    "devices/lock",
    "data/rotating",
    "work/__init__",
    "layers/__init__",
    "layers/events",
    "layers/ranges",
    "layers/host",
    "layers/attribution",
    "layers/replayed",
    "layers/partition",
    "layers/results",
    "layers/closure",
    "layers/table",
    "profilers/__init__",
    "profilers/earlier",
    "profilers/tools",
    "profilers/reports",
    "profilers/projection",
    "profilers/metrics",
    "profilers/nsys",
    "profilers/ncu",
    "profilers/nvtx",
    "profilers/passing",
    "ranks/__init__",
    "ranks/orders",
    "ranks/joint",
    "probes/__init__",
    "probes/energy",
    "probes/timing",
    "probes/work",
    "probes/queue",
    "probes/depth",
    "algorithms/__init__",
    "algorithms/default",
    "algorithms/choice",
    "algorithms/report",
    "algorithms/passes",
)

MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def name_of(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def room_of(path):
    return name_of(path).split("/")[0]


def imports_of(path):
    """Absolute names of what a module imports, wherever in it, type checking aside."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_or_sideways(path):
    room = room_of(path)
    if room == "__init__":
        return
    for imported in imports_of(path):
        parts = imported.split(".")
        if parts[0] == "perfexp" and len(parts) > 1 and parts[1] in FLOOR_OF:
            assert FLOOR_OF[parts[1]] <= FLOOR_OF[room], f"{name_of(path)} imports {imported}, which is above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_foreign_packages_stay_in_their_rooms(path):
    room = room_of(path)
    for imported in imports_of(path):
        package = imported.split(".")[0]
        if package in ONLY:
            assert room in ONLY[package], f"{name_of(path)} imports {package}"
        if package in ("torch", "torchvision"):
            assert name_of(path) not in TORCH_FREE, f"{name_of(path)} imports {package}: the fakes must start without"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_on_a_floor_and_have_a_name(path):
    room = room_of(path)
    assert room == "__init__" or room in FLOOR_OF, f"{name_of(path)} lies on no floor"
    assert path.stem not in FORBIDDEN_NAMES
    assert len(path.relative_to(PACKAGE).parts) <= 2, "at most two levels of package"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_in_their_first_line_what_they_are(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{name_of(path)} says nothing"


def test_no_module_imports_itself_in_a_circle():
    edges = {}
    known = {name_of(path).replace("/__init__", "").replace("/", "."): path for path in MODULES}
    for name, path in known.items():
        targets = (imported.removeprefix("perfexp.") for imported in top_level_imports(path))
        edges[name] = {target for target in targets if target in known and target != name}
    visited, stack = set(), []

    def visit(name):
        if name in stack:
            raise AssertionError(" → ".join([*stack[stack.index(name) :], name]))
        if name in visited:
            return
        visited.add(name)
        stack.append(name)
        for target in edges[name]:
            visit(target)
        stack.pop()

    for name in edges:
        visit(name)


def top_level_imports(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_doubt_is_explained():
    """Wherever a doubt is made, its code stands in the tables of diagnostics."""
    explained = (PACKAGE.parent / "docs" / "reference" / "diagnostics.md").read_text()
    codes = {
        node.value.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    }
    assert len(codes) > 30
    assert not [code for code in sorted(codes) if f"`{code}`" not in explained]
