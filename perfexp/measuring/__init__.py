"""The measuring procedure of one point. Start reading in `procedure`."""
