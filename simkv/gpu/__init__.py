"""The GPU runner: the schedulers that simkv simulates, running a transformer on a device.

Recommended order for reading the files:

    timer.py                   read the time: wall clock, or CPU time of this thread
    kv_pool.py                 the paged KV pool
    batch_inputs.py            a batch and its block tables as flat arrays of a fixed size
    cpu_ops.py                 norm, rotary positions, paged attention: vectorized torch
    triton_kernels.py          the same operations as Triton kernels
    triton_tile_configs.py     attention kernel parameters by architecture, as measured
    cuda_ops.py                launchers of the kernels: grids, splits
    transformer.py             random weights, and one forward pass over flat inputs
    graph_buckets.py           padded step sizes, each with one CUDA graph
    cuda_graphs.py             the pass over static buffers as CUDA graphs
    prompt_token_ids.py        token ids of prompts, equal where the workload shares them
    batch_runner.py            run batches: prepare, launch (graph or eager), wait
    torch_executor.py          wall clock, scheduler recorder and measuring executor
    overlapped_engine.py       pipelined steps, prepared while the device runs a step
    device_memory.py           models and pools that fit into the device memory
    scenario_execution.py      `simkv gpu run`: run a scenario on the device
    execution_record.py        setup and record of a run, and its output files
    validation_plan_runner.py  `simkv gpu validate`: run the scenarios that test a profile
    campaign_plan.py           `simkv gpu calibrate`: steps to measure, the most useful first
    microbenchmark.py          a model to time steps and parts of steps
    campaign.py                all measurements within a time limit
    profile_fit.py             from measurements to a cost profile and its error
    whole_step.py              cost of whole steps beyond the sum of their parts
    gpu_calibration.py         measure and fit, and the overhead of the host
    device_clocks.py           log of the device's clocks, once a second
    machine_info.py            machine data, timing, and peak rates of the device
    kernel_benchmark.py        `simkv gpu bench`: kernels and steps relative to the peak rates
    varlen_baseline.py         attention of torch, for comparison

Model shapes are in costs/hardware/model_shape.py. Runs are replayed and evaluated without torch in
validation/gpu_runs. Outside this package, only the command line imports torch, and `import simkv`
imports nothing from here.
"""
