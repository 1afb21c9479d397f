"""Command line: composition with Hydra, help, completion, and commands in a run's folder.

May import: host, models, plan, records, run.
Used by: __main__, api, commands, main.
"""
