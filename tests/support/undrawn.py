"""Runs that leave the same files as ever, but draw nothing: a picture costs half as much as a short run.

`python -m tests.support.undrawn …` is perfexp in a process of its own, without pictures.
"""

import sys
from contextlib import contextmanager

from perfexp import __main__
from perfexp.report import run_files
from perfexp.report.tables import layer_tables

#: Written where a run would draw a picture.
STAND_IN = b"\x89PNG\r\n\x1a\n stands in for a picture"


def layers_png(record):
    return STAND_IN if layer_tables.representative_point(record) else None


def png(picture):
    return None if picture is None else STAND_IN


@contextmanager
def stand_ins():
    """Within the block, runs of this process draw nothing."""
    before = run_files._layers_png, run_files._png
    run_files._layers_png, run_files._png = layers_png, png
    try:
        yield
    finally:
        run_files._layers_png, run_files._png = before


if __name__ == "__main__":
    with stand_ins():
        sys.exit(__main__.main())
