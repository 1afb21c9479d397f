"""Documentation: generated pages are current, names in the code are explained, links lead somewhere."""

import ast
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from perfexp.records import diagnostics
from perfexp.records.quantities import QUANTITIES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(
    path
    for folder in ("tutorial", "how-to", "reference", "explanation")
    for path in (DOCS / folder).glob("*.md")
)


def generator():
    spec = importlib.util.spec_from_file_location("perfexp_docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    """`python docs/generate.py` would change nothing."""
    for path, text in generator().pages().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run python docs/generate.py: {path.name} is not current"
        )


def test_a_key_without_a_description_is_an_error():
    module = generator()
    with pytest.raises(module.Stale):
        module.record({"Key": {"_": "identity of a point"}})


def test_diagnostics_have_seven_families_with_a_section_each():
    families = diagnostics.families()
    page = (REFERENCE / "diagnostics.md").read_text()
    assert len(families) == 7
    for family, codes in families.items():
        section = page.partition(f"\n## {family.capitalize()}\n")[2].partition("\n## ")[0]
        assert all(f"| `{code}` |" in section for code in codes)


def test_a_metric_is_declared_once():
    """Neither name, title nor column of a metric is written out in a second place of the package."""
    words = {part for one in QUANTITIES.values() for part in (one.name, one.heading, one.csv)}
    words = {
        word for word in words if re.search(r"[ _/]", word)
    }  # others are words of any sentence
    written = Counter(
        (path.relative_to(ROOT / "perfexp").as_posix(), node.value)
        for path in (ROOT / "perfexp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in words
    )
    registry = {
        word: number for (path, word), number in written.items() if path == "records/quantities.py"
    }
    assert registry == dict.fromkeys(words, 1)
    keys_of_file = {
        ("report/tables/vendor_file.py", key) for key in ("epoch_seconds", "total_runtime_seconds")
    }
    assert written.keys() - keys_of_file == {("records/quantities.py", word) for word in words}


def test_every_metric_is_explained():
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert len(QUANTITIES) > 60
    assert all(
        one.meaning and f"`{one.name.replace('*', 'NAME')}`" in page for one in QUANTITIES.values()
    )


def test_the_readme_is_one_page():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "AGENTS.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(str(p.relative_to(ROOT)) for p in PAGES),
    ],
)
def test_relative_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [
        target.split("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if "://" not in target
    ]
    if not (DOCS / "results").is_dir():
        targets = [target for target in targets if "results/" not in target]
    assert not [
        target for target in targets if target and not ((ROOT / page).parent / target).exists()
    ]


def test_the_documented_imports_work():
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *PAGES])
    statements = set(re.findall(r"^from perfexp[\w.]* import [\w, ]+$", text, flags=re.M))
    assert len(statements) >= 4
    for statement in statements:
        exec(statement)


def test_the_tested_versions_of_python_are_the_same_everywhere():
    """README and architecture in one sentence, with each version that pyproject.toml names."""
    texts = [
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/explanation/architecture.md")
    ]
    [tested] = {re.search(r"Tested on Linux: .*? untested", text)[0] for text in texts}
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "classifiers"
    ]
    versions = [text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)]
    assert re.findall(r"Python (3\.\d+)", tested) == versions


def test_no_line_begins_as_a_comment():
    """MyST leaves out a line that begins with %."""
    pages = [*PAGES, *(DOCS / "results").glob("*.md"), ROOT / "README.md"]
    lines = [f"{page.name}: {line}" for page in pages for line in page.read_text().splitlines()]
    assert [line for line in lines if ": %" in line[: line.index(":") + 3]] == []
