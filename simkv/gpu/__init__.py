"""The real engine: the schedulers that simkv simulates, driving a transformer on a device.

Read in this order; each file is about one thing.

    ticks.py      what time it is: by the wall, or by the work of this thread
    pool.py       the paged KV pool
    inputs.py     a batch and its block tables as flat arrays of a fixed size
    cpu_ops.py    norm, rotary positions, paged attention: vectorised torch
    kernels.py    the same as Triton kernels
    tiles.py      how attention is built for each architecture, and what was measured to be best
    cuda_ops.py   their launchers: grids, splits
    model.py      random weights, and one forward pass over flat inputs
    buckets.py    the sizes that steps are padded to, so that a graph can be captured for each
    graphs.py     the pass over static buffers of these sizes, captured as CUDA graphs
    prompts.py    token ids of prompts, equal where the workload says so
    runner.py     runs batches: prepare, launch (graph or eager), wait
    executor.py   the seam: wall clock, a scheduler watched, an executor that measures
    overlap.py    steps of pipelined schedulers, prepared while the device runs the last
    serve.py      `simkv gpu run`: a scenario for real
    served.py     what it was and did, and what it leaves behind
    trials.py     `simkv gpu validate`: the scenarios that judge a profile, one after another
    probes.py     `simkv gpu calibrate`: which parts of steps are measured, the most useful first
    stand.py      a model to time them on
    campaign.py   all points within a time, every measurement written at once
    steadied.py   the measurements without the device's drift; stalls counted
    fit.py        from the measurements to a cost profile and its error
    whole.py      what whole steps cost beyond the sum of their parts
    calibrate.py  both, and what the host adds
    clocks.py     what the device says of itself meanwhile, a line a second
    machine.py    what a run was made on, how long something takes, and the device's two ceilings
    bench.py      `simkv gpu bench`: how near kernels and steps come to the ceilings
    anchor.py     attention by FlashAttention 3, to stand beside ours

Shapes of the models are facts (costs/hardware/shapes.py). What was served is replayed and judged
without torch, in proof/validation/served. Nothing outside this package imports torch but the
command line, and nothing here is imported by `import simkv`.
"""
