"""The real engine: the schedulers that simkv simulates, driving a transformer on a device.

Read in this order; each file is about one thing.

    shapes.py     shapes of the models (no torch)
    pool.py       the paged KV pool, and its blocks swapped to host memory
    inputs.py     a batch and its block tables as flat arrays of a fixed size
    cpu_ops.py    norm, rotary positions, paged attention: vectorised torch
    kernels.py    the same as Triton kernels
    cuda_ops.py   their launchers: grids, tiles, splits
    model.py      random weights, and one forward pass over flat inputs
    buckets.py    the sizes that steps are padded to, so that a graph can be captured for each
    prompts.py    token ids of prompts, equal where the workload says so
    runner.py     runs batches: prepare, launch (graph or eager), wait
    tables.py     schedulers that hand out real block tables
    executor.py   the seam: wall clock, a scheduler watched, an executor that measures
    serve.py      `simkv gpu serve`: a scenario for real
    served.py     what it was and did, and what it leaves behind
    replay.py     the simulator on the recorded step times: the decisions must be the same
    points.py     `simkv calibrate`: which parts of steps are measured, the most useful first
    stand.py      a model to time them on
    campaign.py   all points within a time, every measurement written at once
    fit.py        from the measurements to a cost profile and its error
    calibrate.py  both, and what the host adds
    machine.py    what a run was made on, and the device's two ceilings
    validate.py   a profile judged by a real run, at three levels
    baselines.py  plain cost models beside it
    suite.py      `simkv validate gpu`: the scenarios that judge a profile
    sizing.py     how long they are and under what load, by the profile itself
    suite_files.py, suite_run.py, suite_report.py, suite_plots.py   planned, served, judged, drawn

Nothing outside this package imports torch, and nothing here is imported by `import simkv`.
"""
