"""Names of jobs in SLURM: the identity of a sweep comes from a file, which may hold anything."""

import pytest

from perfexp.run.cluster.job_states import job_name


@pytest.mark.parametrize("sweep", ["a\0b", "a,b", "a b", "a\nb", "", "a/../b"])
def test_a_job_has_a_plain_name(sweep):
    name = job_name(sweep)
    assert name.startswith("perfexp-")
    assert not set(name) & set("\0\n ,/")


def test_the_identity_that_perfexp_gives_stays():
    assert job_name("5f1d0c6e8b3a4f7c") == "perfexp-5f1d0c6e8b3a4f7c"
