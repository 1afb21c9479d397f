"""Measuring: the procedure of a point. Start reading in `procedure`."""
