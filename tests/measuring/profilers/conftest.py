"""A folder for scripted tools that is first on the PATH, and perfexp run in a folder of its own."""

import sqlite3
from contextlib import closing

import pytest
from scripted import METRICS_SM90, NCU, NSYS, REPORTS, VERSION, Scripted, ncu_csv

from perfexp.main import main
from perfexp.records.record import Record

#: Two calls: the forward pass is launched by one thread, the backward pass by another.
KERNELS = [
    (1, "fprop", 100),
    (1, "relu", 200),
    (2, "dgrad", 300),
    (2, "wgrad", 400),
    (2, "relu_back", 500),
]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    folder = tmp_path / "tools"
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


@pytest.fixture
def database(tmp_path):
    """What nsys exports, with two steps of five kernels each."""
    path = tmp_path / "exported.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
                                      globalTid INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
                                                      correlationId INTEGER, nameId INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, correlationId INTEGER,
                                                     demangledName INTEGER, shortName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, correlationId INTEGER);
            """
        )
        for index, name in enumerate(["train_step", *(kernel for _, kernel, _ in KERNELS)]):
            connection.execute("INSERT INTO StringIds VALUES (?, ?)", (index, name))
        for step in range(2):
            base = 10_000 * step
            nvtx = [("train_step", 0, 1000), ("forward", 50, 250), ("backward", 260, 900)]
            for name, start, end in nvtx:
                text = (None, 0) if name == "train_step" else (name, None)
                row = (base + start, base + end, 60, *text, 1)
                connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
            connection.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'pushed', NULL, 1)", (base, base + 1000)
            )
            for number, (thread, _, issued) in enumerate(KERNELS):
                correlation = 100 * step + number
                start = base + 2000 + 1000 * number
                runtime = (base + issued, base + issued + 10, thread, correlation, 0)
                connection.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", runtime
                )
                kernel = (start, start + 800, correlation, number + 1, number + 1)
                connection.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", kernel
                )
        connection.commit()
    return path


@pytest.fixture
def nsys(tools, database):
    """A function that installs an nsys that answers so."""

    def install(**script):
        return Scripted(
            tools,
            "nsys",
            NSYS,
            {"version": VERSION, "reports": REPORTS, "database": str(database), **script},
        )

    return install


@pytest.fixture
def ncu(tools):
    """A function that installs an ncu that answers so."""
    whole = ncu_csv(["forward", "backward", "backward"], ["fprop", "dgrad", "wgrad"])

    def install(**script):
        defaults = {
            "version": "Version 2025.3.0.0 (build 1)",
            "metrics": METRICS_SM90,
            "csv": whole,
        }
        return Scripted(tools, "ncu", NCU, {**defaults, **script})

    return install


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs perfexp in a folder of its own: exit code, what it printed, and the records that it left."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        code = main(arguments)
        printed = capsys.readouterr()
        records = [Record.load(file) for file in sorted(tmp_path.rglob("record.json"))]
        return code, printed.out + printed.err, records

    return go
