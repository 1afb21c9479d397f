"""Host: the operating system with its files, locks, signals, processes and caches.

May import: no other room.
Used by: __main__, api, cli, commands, comparison, convolution, cost, data, devices, doctor, main,
    measuring, models, plan, records, report, roofline, run, worker.
"""
