"""What data of anybody's own has to have."""

import pytest

from perfexp.data import check
from perfexp.data.synthetic import Synthetic
from perfexp.errors import UserError


def test_data_that_lacks_something_is_refused_by_its_name():
    class Stripes:
        labelled, num_classes, num_samples = False, None, None

        def open(self):
            """Never called."""

    with pytest.raises(UserError, match="Stripes lacks held_out, workers; "):
        check(Stripes())
    check(Synthetic())
