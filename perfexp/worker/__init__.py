"""Worker: the process that measures; only it imports torch and touches the device.

May import: convolution, cost, data, devices, doctor, host, measuring, models, plan, records,
    statistics.
Used by: api.
"""
