"""The GPU runner: the schedulers that simkv simulates, running a transformer on a device.

Read the files in this order; each has one topic.

    timer.py                   read the time: wall clock, or CPU time of this thread
    kv_pool.py                 the paged KV pool
    batch_inputs.py            a batch and its block tables as flat arrays of a fixed size
    cpu_ops.py                 norm, rotary positions, paged attention: vectorized torch
    triton_kernels.py          the same as Triton kernels
    triton_tile_configs.py     attention kernel parameters by architecture, as measured
    cuda_ops.py                launchers of the kernels: grids, splits
    transformer.py             random weights, and one forward pass over flat inputs
    graph_buckets.py           padded step sizes, so that a graph can be captured for each
    cuda_graphs.py             the pass over static buffers of these sizes as CUDA graphs
    prompt_token_ids.py        token ids of prompts, equal where the workload shares them
    batch_runner.py            run batches: prepare, launch (graph or eager), wait
    torch_executor.py          wall clock, scheduler recorder and measuring executor
    overlapped_engine.py       pipelined steps, prepared while the device runs the last one
    device_memory.py           models and pools that fit; one runner at a time
    scenario_execution.py      `simkv gpu run`: run a scenario on the device
    execution_record.py        setup and record of a run, and its output files
    validation_plan_runner.py  `simkv gpu validate`: run the scenarios that test a profile
    campaign_plan.py           `simkv gpu calibrate`: points to measure, the most useful first
    microbenchmark.py          a model to time the points on
    campaign.py                all points within a time limit, each written at once
    profile_fit.py             from measurements to a cost profile and its error
    whole_step.py              cost of whole steps beyond the sum of their parts
    gpu_calibration.py         measure and fit, and what the host adds
    device_clocks.py           log of the device's clocks, once a second
    machine_info.py            machine data, timing, and the two ceilings of the device
    kernel_benchmark.py        `simkv gpu bench`: kernels and steps relative to the ceilings
    varlen_baseline.py         attention of torch, for comparison

Model shapes are in costs/hardware/model_shape.py. Runs are replayed and evaluated without torch in
validation/gpu_runs. Outside this package, only the command line imports torch, and `import simkv`
imports nothing from here.
"""
