"""What a run of the tests takes of a large set: always the same part, so that a result depends on the tree alone.

`PERFEXP_ALL=1 python -m pytest …` takes everything at once.
"""

import os
import zlib

#: One in so many slow tests is taken, from all files.
_STRIDE = 24
#: Environment variable that is set while all tests are run.
_WHOLE = "PERFEXP_TESTS_ARE_WHOLE"


def some_of(everything, count, salt=""):
    """So many neighbours of a sequence, which is taken for a ring.

    Args:
        everything: of which some are taken.
        count: how many at most.
        salt: different words start at different places.
    """
    everything = list(everything)
    if os.environ.get("PERFEXP_ALL"):
        return everything
    start = zlib.crc32(salt.encode()) % max(len(everything), 1)
    return (everything[start:] + everything[:start])[:count]


def of_the_whole(items):
    """What a run of all tests leaves out: most slow ones; none where tests were chosen.

    Args:
        items: all tests.
    """
    if not os.environ.get(_WHOLE) or os.environ.get("PERFEXP_ALL"):
        return []
    slow = [item for item in items if item.get_closest_marker("slow")]
    taken = set(slow[::_STRIDE])
    return [item for item in slow if item not in taken]


def note_choice(config):
    """Note for the processes of pytest-xdist whether all tests run: no files, names or markers are given."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        is_whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
        usual = config.getini("addopts")
        os.environ[_WHOLE] = "1" if is_whole and f"-m={config.option.markexpr}" in usual else ""
