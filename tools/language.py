"""Count how the docstrings, comments and names of a package read: `python tools/language.py [FOLDER …]`.

Four figures per package: `Args:` and `Attributes:` entries that do not parse on their own, headless "what" and
"told/tell/tells" per 1,000 words of docstrings, and the share of comment lines. `tests/test_language.py` holds perfexp
to its limits with the functions of this file.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SECTIONS = ("Args:", "Attributes:")
_ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?: (.+)$")
#: First words of a fragment that needs the name of its parameter in front.
_DANGLING = re.compile(
    r"(?:of|that|which|whose|whom|likewise|by(?! default)|for|from|as|in|on|at|to|with|within|without|until|while|when"
    r"|where|beside|before|after|than|are|is|has|have|does|was|were|makes|takes|gives|told|see (?!`)|the same)\b",
    re.IGNORECASE,
)
_WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
_TOLD = re.compile(r"\b(?:told|tell|tells)\b", re.IGNORECASE)
#: Habits whose density says how a text reads, by name.
_HABITS = {
    "of": re.compile(r"\bof\b", re.IGNORECASE),
    "that of": re.compile(r"\b(?:that|those) of\b", re.IGNORECASE),
    "by which": re.compile(
        r"\b(?:by|in|of|for|from|with|on|at|to) which\b|\bwhose\b", re.IGNORECASE
    ),
    "examples": re.compile(r"\b(?:for example|such as)\b|\be\.g\.", re.IGNORECASE),
    "you": re.compile(r"\byou(?:rs?)?\b", re.IGNORECASE),
}
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


@dataclass
class Densities:
    """How often habits occur in texts.

    Attributes:
        words: number of words in all texts.
        habits: number of occurrences by the habit's name, for example `of`.
    """

    words: int = 0
    habits: Counter[str] = field(default_factory=Counter)

    def add(self, text: str) -> None:
        """Count a text."""
        self.words += len(_WORD.findall(text))
        for name, habit in _HABITS.items():
            self.habits[name] += len(habit.findall(text))

    def per_thousand(self, habit: str) -> float:
        """Return a habit's occurrences per 1,000 words."""
        return self.habits[habit] / max(self.words, 1) * 1e3


def prose(markdown: str) -> str:
    """Return a Markdown page without code blocks, inline code and targets of links."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", markdown)
    return re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))


@dataclass
class Counts:
    """Figures of a package."""

    densities: Densities = field(default_factory=Densities)

    entries: int = 0
    dangling: list[str] = field(default_factory=list)
    words: int = 0
    what: int = 0
    told: int = 0
    lines: int = 0
    comments: int = 0
    docstrings: int = 0

    def per_thousand(self, number: int) -> float:
        """A number of occurrences per 1,000 words of docstrings."""
        return number / max(self.words, 1) * 1e3


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names and docstrings of a module and of its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and descriptions in the `Args:` and `Attributes:` sections of a docstring."""
    in_section = False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            in_section = line.strip() in _SECTIONS
        elif in_section and (match := _ENTRY.match(line[4:] if line.startswith("    ") else "")):
            yield match[1], match[2]


def is_dangling(description: str) -> bool:
    """Whether a description is a fragment that does not parse without the name in front of it."""
    return _DANGLING.match(description) is not None


def comment_lines(source: str) -> int:
    """Number of lines with nothing but a comment, and of comments behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def count(folder: Path) -> Counts:
    """Count a package.

    Args:
        folder: root folder of the package.
    """
    counts = Counts()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        counts.lines += source.count("\n")
        counts.comments += comment_lines(source)
        for name, text in docstrings(ast.parse(source)):
            counts.docstrings += 1
            counts.words += len(_WORD.findall(text))
            counts.densities.add(text)
            counts.what += len(_WHAT.findall(text))
            counts.told += len(_TOLD.findall(text))
            for entry, description in entries(text):
                counts.entries += 1
                if is_dangling(description):
                    counts.dangling.append(
                        f"{path.relative_to(folder)}: {name}: {entry}: {description}"
                    )
    return counts


def main() -> None:
    """Print the counts of the folders of the command line; by default of perfexp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[Path(__file__).parent.parent / "perfexp"]
    )
    parser.add_argument(
        "--list", action="store_true", help="print each entry that does not parse on its own"
    )
    options = parser.parse_args()
    for folder in options.folders:
        counts = count(folder)
        share = len(counts.dangling) / max(counts.entries, 1)
        print(
            f"{folder}: {counts.lines} lines, {counts.docstrings} docstrings of {counts.words} words"
        )
        print(f"  dangling entries   {len(counts.dangling)} of {counts.entries} ({share:.1%})")
        print(f"  'what'             {counts.per_thousand(counts.what):.2f} per 1,000 words")
        print(f"  'told/tell/tells'  {counts.per_thousand(counts.told):.2f} per 1,000 words")
        for habit in counts.densities.habits:
            print(f"  {habit!r:<18} {counts.densities.per_thousand(habit):.2f} per 1,000 words")
        print(f"  comments           {counts.comments / max(counts.lines, 1):.1%} of the lines")
        if options.list:
            print(*counts.dangling, sep="\n")


if __name__ == "__main__":
    main()
