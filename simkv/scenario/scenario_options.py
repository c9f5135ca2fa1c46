"""Command-line options that describe a server and its load, in place of a scenario file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True)
class OptionHelp:
    """Help text, metavar and lower bound of a command-line option."""

    help: str
    metavar: str | None = None
    min: float | None = None


@dataclass(frozen=True)
class ScenarioOptions:
    """Options that describe a server and its load. None means that the option is not given."""

    recipe: Annotated[
        str | None,
        OptionHelp(
            help="Use the server and the load of this published benchmark, such as "
            "gpt-oss-120b-h200. Other options override its settings.",
            metavar="NAME",
        ),
    ] = None
    gpu: Annotated[
        str | None, OptionHelp(help="GPU, such as H100, H200, L40S or RTX-4090.", metavar="NAME")
    ] = None
    model: Annotated[
        str | None,
        OptionHelp(
            help="Model name such as Qwen/Qwen3-32B, or path of a Hugging Face config.json.",
            metavar="NAME",
        ),
    ] = None
    engine: Annotated[
        str | None, OptionHelp(help="Engine to simulate (default: vllm).", metavar="NAME")
    ] = None
    version: Annotated[
        str | None,
        OptionHelp(
            help="Release of the engine (default: the newest release that simkv supports).",
            metavar="RELEASE",
        ),
    ] = None
    tp: Annotated[int | None, OptionHelp(help="Tensor parallel size (default: 1).", min=1)] = None
    dp: Annotated[int | None, OptionHelp(help="Data parallel size (default: 1).", min=1)] = None
    from_command: Annotated[
        str | None,
        OptionHelp(
            help="Launch command of a server, such as 'vllm serve Qwen/Qwen3-32B -tp 2', or a "
            "script or compose file that contains it.",
            metavar="COMMAND",
        ),
    ] = None
    load: Annotated[
        str | None,
        OptionHelp(
            help="Benchmark command that describes the load, such as 'vllm bench serve "
            "--request-rate 10'.",
            metavar="COMMAND",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        OptionHelp(
            help="File with requests to replay: a trace (`simkv trace formats` lists the "
            "formats) or a server log.",
            metavar="FILE",
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        OptionHelp(
            help="Requests per second (default: inf, which sends all requests at once).",
            metavar="RATE",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        OptionHelp(
            help="Burstiness of arrivals; smaller values are burstier (default: 1, a Poisson "
            "process)."
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, OptionHelp(help="Maximum number of requests in flight.", min=1)
    ] = None
    num_prompts: Annotated[
        int | None, OptionHelp(help="Number of requests (default: 1000).", min=1)
    ] = None
    input_len: Annotated[
        int | None, OptionHelp(help="Prompt tokens per request (default: 1024).", min=1)
    ] = None
    output_len: Annotated[
        int | None, OptionHelp(help="Output tokens per request (default: 128).", min=1)
    ] = None
    range_ratio: Annotated[
        float | None,
        OptionHelp(
            help="Sample lengths uniformly. A length differs from the mean by at most this "
            "fraction of the mean (default: 0, equal lengths).",
            min=0,
        ),
    ] = None
    prefix_len: Annotated[
        int | None,
        OptionHelp(
            help="Length in tokens of a prefix that all prompts share. The prefix is added to "
            "--input-len (default: 0).",
            min=0,
        ),
    ] = None
    seed: Annotated[
        int | None, OptionHelp(help="Random seed for arrivals and lengths (default: 0).", min=0)
    ] = None
    growth: Annotated[
        float | None,
        OptionHelp(
            help="Multiply the arrival rate of a trace by this factor.", metavar="FACTOR", min=1e-9
        ),
    ] = None
    peak: Annotated[
        str | None,
        OptionHelp(
            help="Replay only the busiest period of a trace, such as 30m or 1h.",
            metavar="DURATION",
        ),
    ] = None

    @property
    def given(self) -> list[str]:
        """Names of the options that were given, with their leading dashes."""
        names = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        return [find_flag(name) for name in names]


def find_flag(name: str) -> str:
    """Return the name of the command-line option for a field of ScenarioOptions."""
    return f"--{name.replace('_', '-')}"
