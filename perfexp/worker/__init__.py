"""Worker: the process that measures; only it imports torch and touches the device.

Start in `entry`, its command line. `workbench` builds device, data and model from the plan;
`points` measures one point after another and stores each result.

May import: convolution, cost, data, devices, doctor, host, measuring, models, plan, records,
    statistics.
Used by: api.
"""
