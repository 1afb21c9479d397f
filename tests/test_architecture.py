"""The house: imports point down, heavy packages stay in their rooms, and every module has a name and a purpose."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from string import Formatter

from perfexp.records.diagnostics import DIAGNOSTICS

PACKAGE = Path(__file__).parent.parent / "perfexp"

#: Rooms from the ground up: a module imports from its own room or from lower floors, deferred imports included.
FLOORS = (
    ("errors",),
    ("statistics", "host"),
    ("work",),
    ("records", "convolutions"),
    ("meters", "roofline", "speed", "stopping", "sweep"),
    ("prediction",),
    ("devices",),
    ("diagnosis", "models"),
    ("data",),
    ("modes",),
    ("probes",),
    ("kernels",),
    ("algorithms", "layers", "ranks"),
    ("measuring", "profilers"),
    ("plan", "summaries"),
    ("comparison", "forecast"),
    ("tables",),
    ("plots",),
    ("reports",),
    ("tracking",),
    ("orchestration",),
    ("cli", "worker"),
    ("cluster",),
    ("main",),
    ("commands",),
    ("api",),
    ("__main__",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MOST_AT_THE_ROOT = 12
MOST_DEFERRED = 60

#: Rooms that may import a foreign package, at any level of nesting.
ONLY = {
    "torch": {
        "algorithms",
        "convolutions",
        "data",
        "devices",
        "diagnosis",
        "kernels",
        "layers",
        "models",
        "probes",
        "profilers",
        "ranks",
        "work",
    },
    "triton": {"kernels"},
    "torchvision": {"models", "data"},
    "hydra": {"main", "cli", "plan"},
    "omegaconf": {"main", "cli", "plan"},
    "mlflow": {"tracking", "commands"},
    "filelock": {"host", "tracking"},
    "matplotlib": {"plots"},
    "pandas": {"tables"},
    "scipy": {"statistics"},
    "pyarrow": {"tables"},
    "rich": {"reports", "summaries"},
    "typer": {"commands"},
}
#: Packages that the modules of a process do not import when they are imported themselves.
STARTS_WITHOUT = {
    "perfexp.__main__": {
        "torch",
        "mlflow",
        "matplotlib",
        "pandas",
        "numpy",
        "scipy",
        "hydra",
        "omegaconf",
        "typer",
        "rich",
    },
    "perfexp.main": {"torch", "mlflow", "matplotlib", "pandas", "pyarrow", "scipy", "typer"},
    "perfexp.commands.list_options": {
        "torch",
        "mlflow",
        "matplotlib",
        "pandas",
        "pyarrow",
        "scipy",
    },
    "perfexp.commands.show": {"torch", "mlflow", "matplotlib", "pandas", "pyarrow", "scipy"},
    "perfexp.worker.entry": {
        "torch",
        "mlflow",
        "matplotlib",
        "pandas",
        "pyarrow",
        "scipy",
        "typer",
        "rich",
    },
    "perfexp.measuring.procedure": {"torch"},
    "perfexp.models.fake": {"torch"},
    "perfexp.devices.fake": {"torch"},
    "perfexp.data.synthetic": {"torch"},
    "perfexp.algorithms.default": {"torch"},
}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}
#: Basenames of modules that have the same role in sibling packages; a command's module is called as the command.
SAME_ROLE = {"__init__", "fake", "nvml"}
COMMANDS = "perfexp.commands."

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text())


def room_of(module):
    return module.split(".")[1] if "." in module else module


def imports_of(module, *, deferred):
    """Absolute names of the imports of a module, those for type checkers aside.

    Args:
        module: one of MODULES.
        deferred: include imports inside functions.
    """
    skipped = {
        id(node)
        for branch in ast.walk(tree_of(module))
        if (isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING"))
        or (not deferred and isinstance(branch, ast.FunctionDef))
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree_of(module)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def own_imports(module, *, deferred):
    return {
        name for name in imports_of(module, deferred=deferred) if name in MODULES and name != module
    }


def imported_with(module):
    """The modules that are imported together with a module, their packages included."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += own_imports(name, deferred=False)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return seen


def test_imports_point_down_and_never_in_a_circle():
    above = [
        f"{module} imports {imported}"
        for module in MODULES
        if module != "perfexp"
        for imported in own_imports(module, deferred=True)
        if imported != "perfexp" and room_of(imported) != room_of(module)
        if FLOOR_OF[room_of(imported)] >= FLOOR_OF[room_of(module)]
    ]
    assert not above
    visited = set()

    def visit(module, path):
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in visited:
            for imported in own_imports(module, deferred=True) - {"perfexp"}:
                visit(imported, [*path, module])
            visited.add(module)

    for module in MODULES.keys() - {"perfexp"}:
        visit(module, [])


def test_heavy_packages_stay_in_their_rooms():
    for module in MODULES:
        for imported in imports_of(module, deferred=True):
            package = imported.split(".")[0]
            assert room_of(module) in ONLY.get(package, {room_of(module)}), (
                f"{module} imports {package}"
            )
    for start, without in STARTS_WITHOUT.items():
        for module in imported_with(start):
            heavy = {
                imported.split(".")[0] for imported in imports_of(module, deferred=False)
            } & without
            assert not heavy, f"{start} imports {module}, which imports {heavy}"


def test_records_are_sent_to_mlflow_by_one_process_only():
    room = [module for module in MODULES if room_of(module) == "tracking"]
    importing = {
        module
        for module in room
        if any(imported.split(".")[0] == "mlflow" for imported in imports_of(module, deferred=True))
    }
    assert importing == {"perfexp.tracking.send"}
    assert not [
        module
        for module in MODULES
        if "perfexp.tracking.send" in own_imports(module, deferred=True)
    ]
    assert not [
        module
        for module in imported_with("perfexp.tracking.send")
        if any(
            imported.split(".")[0] in ("torch", "mlflow")
            for imported in imports_of(module, deferred=False)
        )
    ]


def test_deferred_imports_stay_within_their_limit():
    deferred = [
        (module, imported)
        for module in MODULES
        for imported in own_imports(module, deferred=True) - own_imports(module, deferred=False)
    ]
    assert len(deferred) <= MOST_DEFERRED, deferred


def test_modules_have_a_room_a_name_of_their_own_and_a_purpose():
    for module, path in MODULES.items():
        assert room_of(module) in FLOOR_OF or module == "perfexp", f"{module} has no floor"
        assert path.stem not in FORBIDDEN_NAMES
        assert len(path.relative_to(PACKAGE).parts) <= 2, f"{module}: at most two levels of package"
        assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"
    assert len([path for path in MODULES.values() if path.parent == PACKAGE]) <= MOST_AT_THE_ROOT
    names = Counter(
        path.stem for module, path in MODULES.items() if not module.startswith(COMMANDS)
    )
    assert not [name for name, number in names.items() if number > 1 and name not in SAME_ROLE]


def fields_of(rule):
    texts = (rule.message, rule.help, f"{{{rule.by}}}" if rule.by else "")
    return {
        field for text in texts for _, field, _, _ in Formatter().parse(text) if field is not None
    }


def test_every_diagnostic_is_in_the_table_and_every_row_is_used():
    """The class is called by the module of the table alone: everybody else calls `diagnostics.make`, with a literal."""
    used = set()
    for module in MODULES.keys() - {"perfexp.records.diagnostics"}:
        assert "perfexp.records.diagnostics.make" not in imports_of(module, deferred=True), module
        for call in (node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)):
            assert ast.unparse(call.func) not in ("Diagnostic", "diagnostics.Diagnostic"), module
            if ast.unparse(call.func) == "diagnostics.make":
                code = ast.literal_eval(call.args[0])
                fields = [keyword.arg for keyword in call.keywords]
                assert sorted(fields, key=str) == sorted(fields_of(DIAGNOSTICS[code])), (
                    module,
                    code,
                )
                used.add(code)
    assert used == DIAGNOSTICS.keys()
