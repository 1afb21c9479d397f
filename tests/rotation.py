"""What one run of the tests takes of a large set: another part for each commit, so that in time everything is run.

`PERFEXP_ALL=1 python -m pytest …` takes everything at once.
"""

import os
import subprocess
import zlib
from functools import cache
from pathlib import Path


@cache
def commit_number():
    """The commit's hash as a number; 0 where there is none to be had."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
        return int(told.stdout, 16)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def some_of(everything, count, salt=""):
    """So many neighbours of a sequence, which is taken for a ring, by the commit.

    Args:
        everything: of which some are taken.
        count: how many at most.
        salt: different words start at different places.
    """
    everything = list(everything)
    if os.environ.get("PERFEXP_ALL"):
        return everything
    start = (commit_number() + zlib.crc32(salt.encode())) % max(len(everything), 1)
    return (everything[start:] + everything[:start])[:count]
