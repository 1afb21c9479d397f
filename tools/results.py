"""The pages of docs/results, made from the data files beside them.

    python tools/results.py                            # write every page and the index
    python tools/results.py --replace CLAIM ROW.json   # replace the row with the same `case`, then write the pages

Git holds the data only. `sphinx-build` writes the pages itself.

`docs/results/CLAIM.json` holds one claim and its measurements:

* `title`, `group`, `claim`: heading, section of the index, and the claim in one sentence.
* `notes`: paragraphs below the table; may be empty.
* `labels`: column headings for keys whose own words are not enough; may be empty.
* `rows`: one object for each measurement, with exactly these keys:

  * `case`: what distinguishes the row from the others; the same keys in every row.
  * `figures`: numbers, or null where there is none. The last words of a key are its unit (`device_ms`, `failed_count`).
  * `intervals`: 95 % intervals of figures, `{"low": …, "high": …}` or `{"half_width_percent": …}`.
  * `outcome`: results that are not numbers; may be empty.
  * `command`, `version` and `commit` of perfexp, `date` (YYYY-MM-DD), `host`, `device`, `software`: null if unrecorded.
  * `records`: SHA-256 of the raw records, or "none" where they were not stored. A record in
    `docs/results/records/SHA-256.json.xz` is linked from its page.

A new claim or a new row is an edit of a data file. Numbers are printed with the digits that the file has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import textwrap
from decimal import Decimal
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "results"
GROUPS = (
    "Statistics",
    "Cost of measuring",
    "Faults",
    "Times",
    "Layers and energy",
    "Convolution algorithms",
    "Profilers",
    "Segmentation",
    "Several GPUs",
)
FILE_KEYS = frozenset({"title", "group", "claim", "notes", "labels", "rows"})
#: The provenance of a row, in the order and words of the pages.
SOURCE = {
    "command": "command",
    "version": "perfexp version",
    "commit": "commit",
    "date": "date",
    "host": "host",
    "device": "device",
    "software": "software",
    "records": "SHA-256 of the records",
}
ROW_KEYS = frozenset({"case", "figures", "intervals", "outcome", *SOURCE})
#: Last words of a figure's key, and how the unit is printed; the longest match counts.
UNITS = {
    "ms": "ms",
    "us": "µs",
    "seconds": "s",
    "percent": "%",
    "joules": "J",
    "watts": "W",
    "mhz": "MHz",
    "gflop": "GFLOP",
    "mb": "MB",
    "gib": "GiB",
    "count": "",
    "ratio": "",
    "relative_l2": "",
    "gb_per_second": "GB/s",
    "images_per_second": "images/s",
    "samples_per_second": "samples/s",
}


class SchemaError(ValueError):
    """A data file that is not as the head of this script says."""


def unit(key: str) -> str | None:
    """Name of the unit at the end of a figure's key, or None where there is none."""
    endings = [name for name in UNITS if key == name or key.endswith("_" + name)]
    return max(endings, key=len, default=None)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(message)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, Decimal))
        and not isinstance(value, bool)
        and Decimal(value).is_finite()
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() == value != "" and not set("|\n") & set(value)


def _check_interval(key: str, interval: Any, figures: dict[str, Any], where: str) -> None:
    _require(
        key in figures and figures[key] is not None,
        f"{where}: interval of {key!r}, which is not a figure",
    )
    _require(
        isinstance(interval, dict) and all(map(_is_number, interval.values())),
        f"{where}: interval of {key!r}",
    )
    if set(interval) == {"half_width_percent"}:
        _require(interval["half_width_percent"] >= 0, f"{where}: half-width of {key!r} is negative")
    else:
        _require(
            set(interval) == {"low", "high"},
            f"{where}: interval of {key!r} needs low and high, or a half-width",
        )
        _require(
            interval["low"] <= figures[key] <= interval["high"],
            f"{where}: {key!r} is outside its interval",
        )


def check_row(row: Any, where: str) -> None:
    """Raise a SchemaError unless the row has all keys and every value is of its kind."""
    _require(isinstance(row, dict), f"{where}: not an object")
    if row.keys() != ROW_KEYS:
        raise SchemaError(
            f"{where}: missing {sorted(ROW_KEYS - row.keys())}, unknown {sorted(row.keys() - ROW_KEYS)}"
        )
    for key in ("case", "figures", "intervals", "outcome"):
        _require(isinstance(row[key], dict), f"{where}: {key} is not an object")
    _require(bool(row["case"]), f"{where}: case is empty")
    _require(
        bool(row["figures"]) or bool(row["outcome"]), f"{where}: neither a figure nor an outcome"
    )
    for key, value in row["case"].items():
        _require(
            _is_text(value) or _is_number(value),
            f"{where}: case {key!r} is neither text nor a number",
        )
    for key, value in row["figures"].items():
        _require(
            unit(key) is not None,
            f"{where}: figure {key!r} does not end in a unit ({', '.join(UNITS)})",
        )
        _require(
            value is None or _is_number(value),
            f"{where}: figure {key!r} is neither a number nor null",
        )
    for key, interval in row["intervals"].items():
        _check_interval(key, interval, row["figures"], where)
    for key, value in row["outcome"].items():
        _require(
            value is None or _is_text(value), f"{where}: outcome {key!r} is neither text nor null"
        )
    for key in SOURCE:
        _require(row[key] is None or _is_text(row[key]), f"{where}: {key} is neither text nor null")
    if row["date"] is not None:
        try:
            is_date = datetime.date.fromisoformat(row["date"]).isoformat() == row["date"]
        except ValueError:
            is_date = False
        _require(is_date, f"{where}: date {row['date']!r} is not YYYY-MM-DD")
    _require(
        isinstance(row["records"], str)
        and re.fullmatch("none|[0-9a-f]{64}", row["records"]) is not None,
        f"{where}: records is neither a SHA-256 nor 'none'",
    )
    if row["commit"] is not None:
        _require(
            re.fullmatch("[0-9a-f]{7,40}", row["commit"]) is not None,
            f"{where}: commit is not a hash of git",
        )


def check_claim(claim: Any, where: str) -> None:
    """Raise a SchemaError unless the claim is as the head of this script says."""
    _require(isinstance(claim, dict), f"{where}: not an object")
    if claim.keys() != FILE_KEYS:
        missing, unknown = sorted(FILE_KEYS - claim.keys()), sorted(claim.keys() - FILE_KEYS)
        raise SchemaError(f"{where}: missing {missing}, unknown {unknown}")
    for key in ("title", "claim"):
        _require(_is_text(claim[key]), f"{where}: {key} is not a line of text")
    _require(
        claim["group"] in GROUPS,
        f"{where}: group {claim['group']!r} is not one of {', '.join(GROUPS)}",
    )
    _require(
        isinstance(claim["notes"], list) and all(map(_is_text, claim["notes"])),
        f"{where}: notes are not texts",
    )
    labels = claim["labels"]
    _require(
        isinstance(labels, dict) and all(map(_is_text, labels.values())),
        f"{where}: labels are not texts",
    )
    _require(isinstance(claim["rows"], list) and claim["rows"] != [], f"{where}: no rows")
    for number, row in enumerate(claim["rows"], 1):
        check_row(row, f"{where}, row {number}")
    first, columns = claim["rows"][0], set()
    for number, row in enumerate(claim["rows"], 1):
        for key in ("case", "figures", "outcome"):
            same = list(row[key]) == list(first[key])
            _require(same, f"{where}, row {number}: keys of {key} differ from those of row 1")
            columns.update(row[key])
    _require(
        labels.keys() <= columns,
        f"{where}: labels {sorted(labels.keys() - columns)} belong to no column",
    )
    cases = [row["case"] for row in claim["rows"]]
    for number, case in enumerate(cases, 1):
        _require(
            cases.index(case) == number - 1,
            f"{where}, row {number}: the same case as an earlier row",
        )


def _finite(text: str) -> Decimal:
    raise SchemaError(f"{text} is not a number")


def parse(text: str) -> Any:
    """JSON with numbers as they are written."""
    return json.loads(text, parse_float=Decimal, parse_constant=_finite)


def read_claims(folder: Path) -> dict[str, Any]:
    """Every data file of the folder by its name, checked."""
    claims = {}
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stem):
        try:
            claims[file.stem] = parse(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SchemaError(f"{file.name}: {error}") from error
        check_claim(claims[file.stem], file.name)
    return claims


def _compact(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda number: f"\0{number}\0".lower())
    return re.sub(r'"\\u0000(.*?)\\u0000"', r"\1", text)


def dump(claim: dict[str, Any]) -> str:
    """A data file: one line for each value of a row, numbers with their digits."""
    lines = [f' "{key}": {_compact(claim[key])},' for key in ("title", "group", "claim")]
    lines += [' "notes": ['] + [f"  {_compact(note)}," for note in claim["notes"]]
    lines[-1] = lines[-1].rstrip(",")
    lines += [" ],", f' "labels": {_compact(claim["labels"])},', ' "rows": [']
    for row in claim["rows"]:
        values = [
            f'   "{key}": {_compact(row[key])}'
            for key in ("case", "figures", "intervals", "outcome", *SOURCE)
        ]
        lines += ["  {", ",\n".join(values), "  },"]
    lines[-1] = "  }"
    return "\n".join(["{", *lines, " ]", "}"]) + "\n"


def shown(number: int | Decimal, is_error: bool = False) -> str:
    """A number with the digits of the file, errors with an exponent, thousands with commas."""
    if isinstance(number, Decimal) and number and is_error:
        return f"{number:e}".replace("e+", "e")
    text = f"{number:,f}" if isinstance(number, Decimal) else f"{number:,}"
    return text.replace("-", "−")


def _figure(row: dict[str, Any], key: str) -> str:
    value, interval = row["figures"][key], row["intervals"].get(key)
    if value is None:
        return "–"
    if interval is None:
        return shown(value, is_error=unit(key) == "relative_l2")
    if "low" in interval:
        return f"{shown(value)} ({shown(interval['low'])} … {shown(interval['high'])})"
    return f"{shown(value)} ± {shown(interval['half_width_percent'])} %"


def _heading(claim: dict[str, Any], key: str, is_figure: bool) -> str:
    label, symbol = claim["labels"].get(key), ""
    if is_figure:
        name = unit(key) or ""
        symbol = UNITS[name]
        label = label or key.removesuffix(name).rstrip("_").replace("_", " ") or symbol
    label = label or key.replace("_", " ")
    return f"{label}, {symbol}" if symbol and symbol != label else label


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "not recorded"
    if key == "records" and (FOLDER / "records" / f"{value}.json.xz").exists():
        return f"[`{value}`](records/{value}.json.xz)"
    return (
        f"`{value}`"
        if key in {"command", "commit"} or (key == "records" and value != "none")
        else str(value)
    )


def _table(header: list[str], numeric: list[bool], rows: list[list[str]]) -> list[str]:
    rule = ["---:" if is_numeric else "---" for is_numeric in numeric]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _paragraph(text: str) -> list[str]:
    # Code stays on one line, and no line begins with %, which MyST takes for a comment: their
    # spaces become a character that is not a place to break.
    text = re.sub("`[^`]*`| %", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    return [*(line.replace("\0", " ") for line in lines), ""]


def page(claim: dict[str, Any]) -> str:
    """The Markdown page of a claim: its table, its notes, and where each row is from."""
    rows = claim["rows"]
    sources: list[tuple[Any, ...]] = []
    for row in rows:
        source = tuple(row[key] for key in SOURCE)
        if source not in sources:
            sources.append(source)
    case, figures, outcome = (list(rows[0][key]) for key in ("case", "figures", "outcome"))
    has_several = len(sources) > 1
    header = [_heading(claim, key, False) for key in case] + [
        _heading(claim, key, True) for key in figures
    ]
    header += [_heading(claim, key, False) for key in outcome] + ["source"] * has_several
    numeric = (
        [_is_number(rows[0]["case"][key]) for key in case]
        + [True] * len(figures)
        + [False] * len(outcome)
    )
    lines = []
    for row in rows:
        cells = [shown(value) if _is_number(value) else value for value in row["case"].values()]
        cells += [_figure(row, key) for key in figures]
        cells += ["–" if value is None else value for value in row["outcome"].values()]
        if has_several:
            cells.append(str(sources.index(tuple(row[key] for key in SOURCE)) + 1))
        lines.append(cells)
    text = [f"# {claim['title']}", "", *_paragraph(claim["claim"])]
    text += [*_table(header, numeric + [True] * has_several, lines), ""]
    if any(row["intervals"] for row in rows):
        text += _paragraph("Figures with ± or with a range in parentheses have a 95 % interval.")
    for note in claim["notes"]:
        text += _paragraph(note)
    text += ["## Source", ""]
    cells = [
        [_cell(key, value) for key, value in zip(SOURCE, source, strict=True)] for source in sources
    ]
    if has_several:
        numbered = [[str(number), *values] for number, values in enumerate(cells, 1)]
        text += _table(["source", *SOURCE.values()], [True] + [False] * len(SOURCE), numbered)
    else:
        pairs = [list(pair) for pair in zip(SOURCE.values(), cells[0], strict=True)]
        text += _table(["fact", "value"], [False, False], pairs)
    return "\n".join(text) + "\n"


def index(claims: dict[str, Any]) -> str:
    """The Markdown page that lists all claims by group."""
    text = ["# Results", ""]
    text += _paragraph(
        "Each page holds one claim, its newest measurements, and the source of each figure. "
        "A figure without an interval has none. "
        "“Not recorded” marks a fact that was not stored with the measurement. "
        "Commands are those that were run at the row's commit: "
        "the scripts of `benchmarks/` are now in `validation/`, `studies/` and `tools/`."
    )
    text += _paragraph(
        "The data are JSON files in `docs/results`. `python tools/results.py` makes the pages from them."
    )
    text += _paragraph(
        "`tools/sequences` lists the commands that need a GPU. "
        "`python tools/sequence.py tools/sequences/profilers.txt --seconds 590 --out results` "
        "runs as many of them as fit into the time."
    )
    for group in GROUPS:
        members = {name: claim for name, claim in claims.items() if claim["group"] == group}
        if not members:
            continue
        lines = []
        for name, claim in members.items():
            devices = sorted({row["device"] or "not recorded" for row in claim["rows"]})
            link = f"[{claim['title']}]({name}.md)"
            lines.append([link, claim["claim"], ", ".join(devices), str(len(claim["rows"]))])
        header = ["page", "claim", "device", "rows"]
        text += [f"## {group}", "", *_table(header, [False, False, False, True], lines), ""]
    return "\n".join(text).rstrip("\n") + "\n"


def pages(folder: Path) -> dict[Path, str]:
    """Path and text of every page of the folder."""
    claims = read_claims(folder)
    if "index" in claims:
        raise SchemaError("index.json: the name of the index page")
    made = {folder / f"{name}.md": page(claim) for name, claim in claims.items()}
    return {**made, folder / "index.md": index(claims)}


def replace(folder: Path, name: str, row: Any) -> None:
    """Put a row in the place of the one with the same case."""
    file = folder / f"{name}.json"
    claims = read_claims(folder)
    if name not in claims:
        raise SchemaError(f"claim {name!r} not found; choose from {', '.join(claims)}")
    check_row(row, "the new row")
    rows = claims[name]["rows"]
    places = [number for number, old in enumerate(rows) if old["case"] == row["case"]]
    if not places:
        cases = "\n  ".join(_compact(old["case"]) for old in rows)
        raise SchemaError(
            f"no row of {name} has the case {_compact(row['case'])}; its cases:\n  {cases}"
        )
    rows[places[0]] = row
    check_claim(claims[name], file.name)
    file.write_text(dump(claims[name]), encoding="utf-8")


def write(folder: Path) -> None:
    """Write every page, and delete pages without data."""
    made = pages(folder)
    for file in set(folder.glob("*.md")) - made.keys():
        file.unlink()
    for file, text in made.items():
        file.write_bytes(text.encode())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--replace",
        nargs=2,
        metavar=("CLAIM", "ROW.json"),
        help="replace the row with the same case",
    )
    options = parser.parse_args(arguments)
    try:
        if options.replace:
            name, file = options.replace
            replace(options.folder, name, parse(Path(file).read_text(encoding="utf-8")))
        write(options.folder)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
