"""The command line: overrides, help, and commands that are stored in a run's folder."""
