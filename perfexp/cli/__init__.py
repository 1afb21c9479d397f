"""Command line: composition with Hydra, help, completion, and commands in a run's folder.

May import: host, models, plan, records, run.
Used by: __main__, api, commands, main.

`main` measures what a command line describes; this room turns that line into a configuration.
`composition` checks it and runs Hydra. `resume` puts the command of an earlier run in its place.
`usage` and `keys` have the help texts, `completion` the candidates for a shell.
"""
