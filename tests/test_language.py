"""Words: docstrings parse on their own, and the code uses the field's terms."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tools import language

ROOT = Path(__file__).parent.parent

PACKAGE = ROOT / "perfexp"
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

#: Words that have a better one (docs: CONTRIBUTING.md, "Glossary"), in docstrings, messages and public names.
BANNED = re.compile(
    r"\b(told|tells|likewise|rivals?|unqueued|mend|mended|mends|anew|at the most|so long|so many|meanwhile"
    r"|(?<!there )(?:is|are) no(?= [a-z])(?! (?:longer|more|less))|looked (?:at|into|on)|heard)\b",
    re.IGNORECASE,
)
BANNED_IN_NAMES = re.compile(
    r"(?:^|_)(told|rivals?|unqueued|mend|aside|beside|apart|standing|likewise|kept)(?:_|$)"
)
#: Names and texts that others have chosen: stored formats and words of other tools.
EXCEPTIONS = {"rivals", "rival/"}  # names in stored records


@pytest.fixture(scope="module")
def counts():
    return language.count(PACKAGE)


def test_entries_of_docstrings_parse_on_their_own(counts):
    assert len(counts.dangling) <= 0.01 * counts.entries, "\n".join(counts.dangling)


def test_docstrings_name_the_noun_and_machines_do_not_speak(counts):
    assert counts.per_thousand(counts.what) <= 1.5
    assert counts.per_thousand(counts.told) <= 0.1


def test_docstrings_are_plain_and_have_examples(counts):
    density = counts.densities.per_thousand
    assert density("of") <= 35
    assert density("that of") <= 0.3
    assert density("by which") <= 1
    assert density("examples") >= 2


def test_pages_address_their_reader_and_stay_short():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    assert sum(len(text.split()) for text in texts) <= 45_000
    densities = language.Densities()
    for text in texts:
        densities.add(language.prose(text))
    assert densities.per_thousand("you") >= 5
    assert densities.per_thousand("of") <= 28
    assert densities.per_thousand("that of") <= 0.3


def test_public_methods_have_or_inherit_docstrings():
    classes = [
        node
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if is_class(node)
    ]
    bases = {ast.unparse(base).rpartition(".")[2] for node in classes for base in node.bases}
    documented = {
        method.name
        for node in classes
        if node.name in bases or "Protocol" in map(ast.unparse, node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        if ast.get_docstring(method)
        or ast.unparse(method.body[0]) == "..."  # the class's docstring has it
    }
    wrong = [
        f"{node.name}.{method.name}"
        for node in classes
        if not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not ast.get_docstring(method) and method.name not in documented
    ]
    assert len(documented) > 50
    assert not wrong, "\n".join(wrong)


def is_class(node):
    return isinstance(node, ast.ClassDef)


def texts_of(tree):
    """Lines and contents of all string constants, docstrings and formatted strings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_texts_use_the_words_of_the_glossary():
    wrong = [
        f"{name}:{line}: {match[0]}: {' '.join(text[max(match.start() - 40, 0) : match.end() + 40].split())}"
        for name, path in MODULES.items()
        for line, text in texts_of(ast.parse(path.read_text()))
        if text not in EXCEPTIONS
        for match in BANNED.finditer(re.sub(r"`[^`]*`", "", text))
    ]
    assert not wrong, "\n".join(wrong)


def test_public_names_use_the_words_of_the_glossary():
    wrong = [
        f"{name}: {node.name}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        if not node.name.startswith("_")
        and BANNED_IN_NAMES.search(node.name)
        and node.name not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("description", "dangling"),
    [
        ("of a run.", True),
        ("that was measured.", True),
        ("likewise.", True),
        ("by whom it was made.", True),
        ("latency percentiles to report, in percent.", False),
        ("formatted text.", False),
        ("by default, the current folder.", False),
    ],
)
def test_a_dangling_entry_is_recognized(description, dangling):
    assert language.is_dangling(description) is dangling


def test_names_of_tests_have_at_most_60_characters():
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 2000
    assert [name for name in names if len(name) > 60] == []


def test_lines_of_the_package_end_by_column_100():
    long = [
        f"{name}:{number}"
        for name, path in MODULES.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


def test_few_classes_share_a_name():
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert len([name for name, count in names.items() if count > 1]) <= 12


def test_statements_are_plain():
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    found, lines = Counter(), 0
    for name, path in MODULES.items():
        lines += len(path.read_text(encoding="utf-8").splitlines())
        for node in ast.walk(TREES[name]):
            found["comprehensions"] += isinstance(node, comprehensions)
            found["conditional expressions"] += isinstance(node, ast.IfExp)
    assert 1000 * found["comprehensions"] / lines <= 25
    assert 1000 * found["conditional expressions"] / lines <= 15
