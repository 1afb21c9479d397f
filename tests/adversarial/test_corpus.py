"""Every hostile folder of the corpus: nothing of it runs, nothing outside changes, each command ends by itself."""

import re
from pathlib import Path

import pytest

from tests.adversarial.cases import CASES
from tests.adversarial.mutations import mutate
from tests.adversarial.place import Place, commands, driver, make_base
from tests.support.selection import first_always

#: Mutations; validation/hostile.py tries more.
SEEDS = range(40)


@pytest.fixture(scope="module")
def base(shared_folder):
    return shared_folder("hostile_base", make_base)


@pytest.fixture(scope="module")
def driven():
    with driver() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", first_always("SECURITY.md: hostile folders", CASES, count=3))
def test_a_hostile_folder_does_nothing(name, base, driven, tmp_path, request):
    place = Place(tmp_path, chosen_by=None if request.config.option.all else name)
    place.take(base)
    problems = []
    for step in CASES[name](place):
        before = place.state()
        for command in step if isinstance(step, list) else commands(step, place.out):
            driven.run(place, command)
        problems += place.problems(before)
    assert place.answers
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("name", first_always("SECURITY.md: foreign folders", CASES, count=1))
def test_a_foreign_folder_goes_on_by_no_command(name, base, driven, tmp_path, request):
    chosen_by = None if request.config.option.all else name
    place = Place(tmp_path, chosen_by=chosen_by, is_owner=False)
    place.take(base)
    for step in CASES[name](place):
        before, listing = place.state(), place.listing()
        for command in step if isinstance(step, list) else commands(step, place.out):
            if command[0].startswith(("resume=", "reproduce")):
                assert driven.run(place, command).code == 2, place.answers[-1]
        assert place.problems(before) == []
        assert place.listing() == listing


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_always("SECURITY.md: mutated folders", SEEDS))
def test_a_mutated_folder_does_nothing(seed, base, driven, tmp_path):
    place = Place(tmp_path, is_owner=seed % 2 == 0)
    place.take(base)
    given = mutate(place, seed)
    before = place.state()
    for command in given:
        driven.run(place, command)
    assert place.problems(before) == []


def test_every_test_that_security_md_names_exists():
    root = Path(__file__).parents[2]
    rows = [
        line for line in (root / "SECURITY.md").read_text().splitlines() if line.startswith("| ")
    ]
    named = [word for line in rows[1:] for word in re.findall(r"`([^`]+)`", line.split("|")[3])]
    assert len(named) > 20
    for word in named:
        stem = word.rstrip("…")
        known = (
            (root / word).is_file() if "/" in word else any(name.startswith(stem) for name in CASES)
        )
        assert known, word
