"""The house: rooms import what their docstrings say, heavy packages stay in their rooms."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from string import Formatter

from perfexp.records.diagnostics import DIAGNOSTICS

PACKAGE = Path(__file__).parent.parent / "perfexp"

#: Modules at the root that any room may import.
EVERYWHERE = {"perfexp.errors", "perfexp.version"}
#: Modules that only repeat names for others' code.
ALIASES = {"perfexp.orchestration", "perfexp.plots", "perfexp.speed"}
MOST_ROOMS = 20
MOST_AT_THE_ROOT = 12
#: Imports inside functions or for type checkers only.
MOST_DEFERRED = 70

#: Rooms that may import a foreign package, at any level of nesting.
ONLY = {
    "torch": {
        "convolution",
        "cost",
        "data",
        "devices",
        "doctor",
        "measuring",
        "models",
        "timing",
    },
    "triton": {"convolution"},
    "torchvision": {"models", "data"},
    "hydra": {"main", "cli", "plan"},
    "omegaconf": {"main", "cli", "plan"},
    "mlflow": {"report", "commands"},
    "filelock": {"host", "report"},
    "matplotlib": {"report"},
    "pandas": {"api", "commands", "report"},
    "scipy": {"statistics"},
    "pyarrow": {"report"},
    "rich": {"records", "report"},
    "typer": {"commands"},
}
#: Folders within a room that alone may import a foreign package.
ONLY_WITHIN = {
    "matplotlib": "perfexp.report.plots",
    "mlflow": ("perfexp.report.tracking", "perfexp.commands"),
    "pandas": ("perfexp.report.tables", "perfexp.api", "perfexp.commands"),
    "pyarrow": "perfexp.report.tables",
    "triton": "perfexp.convolution.kernels",
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
    "perfexp.convolution.default": {"torch"},
}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}
#: Basenames of modules that have the same role in sibling packages; a command's module is called as the command.
SAME_ROLE = {"__init__", "fake"}
COMMANDS = "perfexp.commands."

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text())


def room_of(module):
    return module.split(".")[1] if "." in module else module


def imports_of(module, *, deferred):
    """Absolute names of the imports of a module.

    Args:
        module: one of MODULES.
        deferred: include imports inside functions, and those for type checkers.
    """
    skipped = {
        id(node)
        for branch in ast.walk(tree_of(module))
        if not deferred
        if isinstance(branch, ast.FunctionDef)
        or (isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING"))
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


def room_imports():
    """The rooms that each room imports, deferred imports and those for types included."""
    found = {room: set() for room in ROOMS}
    for module in MODULES.keys() - ALIASES:
        for imported in own_imports(module, deferred=True) - EVERYWHERE - {"perfexp"}:
            if room_of(imported) != room_of(module):
                found.setdefault(room_of(module), set()).add(room_of(imported))
    return found


def rule_of(room, words):
    """The rooms that a line of a room's docstring lists, such as `May import: host, records.`"""
    text = " ".join(ast.get_docstring(tree_of(f"perfexp.{room}")).split())
    match = re.search(rf"{words}: ([\w, ]+)\.", text)
    assert match, f"perfexp/{room}/__init__.py has no line '{words}: …'"
    return set() if match[1] in ("no other room", "nobody") else set(match[1].split(", "))


def test_rooms_import_what_their_docstring_says():
    imported = room_imports()
    for room in ROOMS:
        listed = ", ".join(sorted(imported[room])) or "no other room"
        assert rule_of(room, "May import") == imported[room], f"{room}: May import: {listed}."
        users = {user for user, rooms in imported.items() if room in rooms}
        listed = ", ".join(sorted(users)) or "nobody"
        assert rule_of(room, "Used by") == users, f"{room}: Used by: {listed}."


def refuse_circles(imports):
    visited = set()

    def visit(name, path):
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in visited:
            for imported in imports.get(name, ()):
                visit(imported, [*path, name])
            visited.add(name)

    for name in imports:
        visit(name, [])


def test_neither_files_nor_rooms_import_in_a_circle():
    refuse_circles({module: own_imports(module, deferred=True) for module in MODULES})
    refuse_circles(room_imports())


def test_heavy_packages_stay_in_their_rooms():
    for module in MODULES:
        for imported in imports_of(module, deferred=True):
            package = imported.split(".")[0]
            assert room_of(module) in ONLY.get(package, {room_of(module)}), (
                f"{module} imports {package}"
            )
            folders = ONLY_WITHIN.get(package, module)
            assert module.startswith(folders), f"{module} imports {package}"
    for start, without in STARTS_WITHOUT.items():
        for module in imported_with(start):
            heavy = {
                imported.split(".")[0] for imported in imports_of(module, deferred=False)
            } & without
            assert not heavy, f"{start} imports {module}, which imports {heavy}"


def test_records_are_sent_to_mlflow_by_one_process_only():
    room = [module for module in MODULES if module.startswith("perfexp.report.tracking")]
    importing = {
        module
        for module in room
        if any(imported.split(".")[0] == "mlflow" for imported in imports_of(module, deferred=True))
    }
    assert importing == {"perfexp.report.tracking.send"}
    assert not [
        module
        for module in MODULES
        if "perfexp.report.tracking.send" in own_imports(module, deferred=True)
    ]
    assert not [
        module
        for module in imported_with("perfexp.report.tracking.send")
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
        assert path.stem not in FORBIDDEN_NAMES
        assert len(path.relative_to(PACKAGE).parts) <= 3, f"{module}: at most two levels of package"
        assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"
    assert len([path for path in MODULES.values() if path.parent == PACKAGE]) <= MOST_AT_THE_ROOT
    assert len(ROOMS) <= MOST_ROOMS
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
