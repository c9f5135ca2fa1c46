"""Read the command line of a serving benchmark as a workload section.

``vllm bench serve``, ``benchmark_serving.py`` and ``sglang.bench_serving`` have the same options
for arrivals; lengths depend on the dataset. Defaults are taken from the tools: vLLM 0.33
(``vllm/benchmarks/serve_throughput.py``, ``vllm/benchmarks/datasets``) and SGLang 0.5.23
(``sglang/benchmark``). Options that only affect reports or the connection are ignored.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError, spelling_hint

#: Words that start each tool, with the tool's defaults for the number of prompts and random
#: lengths.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("bench serve", "benchmark_serving.py"),
    "sglang": ("sglang.bench_serving", "bench_serving.py", "sglang.benchmark.serving"),
}
#: Options for arrivals, with the corresponding field of the arrivals section.
_ARRIVALS = {
    "--request-rate": "request_rate",
    "--burstiness": "burstiness",
    "--num-prompts": "num_prompts",
    "--num-prompt": "num_prompts",
    "--seed": "seed",
    "--ramp-up-strategy": "ramp_up_strategy",
    "--ramp-up-start-rps": "ramp_up_start_rps",
    "--ramp-up-end-rps": "ramp_up_end_rps",
    "--lora-modules": "lora_modules",
    "--lora-assignment": "lora_assignment",
}
_LENGTHS = (
    "--random-input-len",
    "--random-input",
    "--random-output-len",
    "--random-output",
    "--random-range-ratio",
    "--random-prefix-len",
    "--input-len",
    "--output-len",
    "--sonnet-input-len",
    "--sonnet-output-len",
    "--sonnet-prefix-len",
    "--prefix-repetition-prefix-len",
    "--prefix-repetition-suffix-len",
    "--prefix-repetition-num-prefixes",
    "--prefix-repetition-output-len",
    "--gsp-num-groups",
    "--gsp-prompts-per-group",
    "--gsp-system-prompt-len",
    "--gsp-question-len",
    "--gsp-output-len",
)
_OTHER = ("--max-concurrency", "--dataset-name", "--dataset-path", "--ignore-eos")
#: Options without a value, and options with several values.
_SWITCHES = frozenset(
    {
        "--ignore-eos",
        "--disable-ignore-eos",
        "--disable-tqdm",
        "--profile",
        "--save-result",
        "--save-detailed",
        "--append-result",
        "--use-beam-search",
        "--trust-remote-code",
        "--no-stream",
        "--no-oversample",
        "--insecure",
        "--skip-chat-template",
        "--custom-skip-chat-template",
        "--plot-timeline",
        "--plot-dataset-stats",
        "--skip-tokenizer-init",
        "--disable-shuffle",
        "--enable-multimodal-chat",
        "--output-details",
        "--print-requests",
        "--disable-stream",
        "--return-logprob",
        "--cache-report",
        "--apply-chat-template",
        "--flush-cache",
        "--pd-separated",
        "--tokenize-prompt",
        "--profile-by-stage",
        "--plot-throughput",
        "--return-routed-experts",
        "--use-trace-timestamps",
        "--no-reranker",
        "--self-timed",
        "--fake-prefill",
        "--random-image-count",
        "--gsp-fast-prepare",
        "--gsp-send-routing-key",
        "--gsp-ordered",
        "--custom-ensure-client-side-data",
    }
)
_LISTS = frozenset(
    {
        "--lora-modules",
        "--goodput",
        "--metadata",
        "--header",
        "--lora-name",
        "--token-ids-logprob",
        "--profile-activities",
        "--profile-stages",
    }
)
#: Options that affect the load but are not reproduced.
_NOT_MODELLED = {
    "--num-warmups": "warm-up requests are not simulated",
    "--warmup-requests": "warm-up requests are not simulated",
    "--probe-request-rate": "probe requests are not simulated",
    "--use-beam-search": "beam search is not modelled",
    "--lora-name": "adapters are set with workload.arrivals.lora_modules",
    "--apply-chat-template": "the tokens of the chat template are not added",
    "--extra-body": "options of requests are not read",
    "--extra-request-body": "options of requests are not read",
    "--random-batch-size": "only single prompts are modelled",
}
#: Names of the datasets whose lengths are determined by options.
_SYNTHETIC = ("random", "random-ids", "sonnet", "prefix_repetition", "generated-shared-prefix")


@dataclass(frozen=True)
class BenchCommand:
    """Workload section for the command line of a benchmark.

    - ``used``, ``ignored``: options of the command line.
    - ``not_modelled``: options that simkv does not model, with reasons.
    """

    workload: dict[str, Any]
    used: tuple[str, ...]
    ignored: tuple[str, ...]
    not_modelled: tuple[str, ...]

    def summary(self) -> list[str]:
        """Return messages about options that have no effect in simkv."""
        # One line lists the options that do not affect the load, and one line each the options that
        # simkv does not model.
        lines = (
            [f"ignored (no effect on the load): {', '.join(self.ignored)}"] if self.ignored else []
        )
        return [*lines, *(f"not modelled: {text}" for text in self.not_modelled)]


def read_bench_command(text: str, option: str = "--load") -> BenchCommand:
    """Read the command line of a benchmark. Raises InputError if it is invalid.

    ``option`` is the name of simkv's option in the error message.
    """
    # Without ``--dataset-name``, the default dataset of the tool is used. If it is ``random``, the
    # options determine the lengths. SGLang's default needs a tokenizer and is an error, unless an
    # option gives the lengths.
    tool, words = _after_tool(text, option)
    given = _options(words, option)
    values = {name: value for name, value, _ in given}
    known = {*_ARRIVALS, *_LENGTHS, *_OTHER}
    used = tuple(shown for name, _, shown in given if name in known)
    noted = tuple(
        f"{shown}: {_NOT_MODELLED[name]}" for name, _, shown in given if name in _NOT_MODELLED
    )
    ignored = tuple(
        shown for name, _, shown in given if name not in known and name not in _NOT_MODELLED
    )
    return BenchCommand(_workload(tool, values, option), used, ignored, noted)


def _after_tool(text: str, option: str) -> tuple[str, list[str]]:
    """Return the tool and the words after it."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{option}: not a valid command: {str(error).lower()}") from error
    for tool, starts in TOOLS.items():
        for start in starts:
            parts = start.split()
            for place in range(len(words) - len(parts) + 1):
                here = [word.rsplit("/", 1)[-1] for word in words[place : place + len(parts)]]
                if here == parts:
                    return tool, words[place + len(parts) :]
    expected = ", ".join(start for starts in TOOLS.values() for start in starts)
    raise InputError(
        f"{option}: found no benchmark command in {text[:60]!r}; expected one of {expected}"
    )


def _options(words: list[str], option: str) -> list[tuple[str, Any, str]]:
    """Return name, value and text of each option."""
    found: list[tuple[str, Any, str]] = []
    rest = list(words)
    while rest and rest[0] not in _ENDS:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise InputError(f"{option}: unexpected word {word!r}; expected --NAME")
        head, sign, text = word.partition("=")
        name = head.replace("_", "-")
        values = [text] if sign else _values(name, head, rest, option)
        _check_name(name, head, option)
        value: Any = values if name in _LISTS else values[0] if values else True
        found.append((name, value, shlex.join([head, *values])))
    return found


#: Words that end a command in a shell line.
_ENDS = (">", ">>", "|", "2>&1", "&", "&&", ";")


def _values(name: str, head: str, rest: list[str], option: str) -> list[str]:
    """Remove the values of an option from ``rest`` and return them."""
    if name in _SWITCHES or name.startswith("--no-"):
        return []
    values: list[str] = []
    while rest and rest[0] not in _ENDS and not re.match(r"--?[a-zA-Z]", rest[0]):
        values.append(rest.pop(0))
        if name not in _LISTS:
            break
    if not values:
        raise InputError(f"{option}: {head}: expected a value")
    return values


def _check_name(name: str, head: str, option: str) -> None:
    """Raise InputError for an unknown option that resembles an option with an effect."""
    known = {*_ARRIVALS, *_LENGTHS, *_OTHER, *_NOT_MODELLED, *_SWITCHES, *_LISTS}
    if name not in known and (hint := spelling_hint(name, (*_ARRIVALS, *_LENGTHS, *_OTHER))):
        raise InputError(f"{option}: {head}: unknown option{hint}")


def _workload(tool: str, values: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the workload section for the options of a tool."""
    number = _Numbers(values, option)
    default = "random" if tool == "vllm" or not values.keys().isdisjoint(_LENGTHS) else "sharegpt"
    dataset = str(values.get("--dataset-name", default))
    if dataset not in _SYNTHETIC:
        return _of_file(dataset, values, number, option)
    lengths = {
        "random": _random,
        "random-ids": _random,
        "sonnet": _sonnet,
        "prefix_repetition": _repeated,
        "generated-shared-prefix": _grouped,
    }[dataset](number, tool)
    arrivals: dict[str, Any] = {
        "num_prompts": number("--num-prompts", number("--num-prompt", 1000)),
        **({} if "--ramp-up-strategy" in values else {"request_rate": math.inf}),
    }
    for name, field in _ARRIVALS.items():
        if name in values and field not in ("num_prompts",):
            value = values[name]
            plain = field in ("ramp_up_strategy", "lora_modules", "lora_assignment")
            arrivals[field] = value if plain else number(name, 0)
    if "ramp_up_strategy" in arrivals:
        arrivals.pop("request_rate", None)
    if lora := arrivals.get("lora_modules"):
        arrivals["lora_modules"] = [one.partition("=")[0] for one in lora]
    arrivals |= lengths
    limit = {}
    if "--max-concurrency" in values:
        limit = {"max_concurrency": number("--max-concurrency", 1)}
    return {"arrivals": arrivals, **limit}


class _Numbers:
    """Numeric values of options."""

    def __init__(self, values: Mapping[str, Any], option: str) -> None:
        self.values, self.option = values, option

    def __call__(self, name: str, default: Any) -> Any:
        """Return the number of an option: int if whole, ``inf`` for infinity."""
        if name not in self.values:
            return default
        text = str(self.values[name])
        try:
            value = float(text)
        except ValueError as error:
            raise InputError(f"{self.option}: {name} {text}: expected a number") from error
        return value if math.isinf(value) or not value.is_integer() else int(value)

    def ratio(self) -> tuple[float, float]:
        """Return the two values of ``--random-range-ratio``: for prompts and for outputs."""
        text = str(self.values.get("--random-range-ratio", "0.0"))
        try:
            value = json.loads(text)
            if isinstance(value, dict):
                return float(value.get("input", 0)), float(value.get("output", 0))
            return float(value), float(value)
        except (ValueError, TypeError) as error:
            why = 'expected a number or {"input": ..., "output": ...}'
            raise InputError(f"{self.option}: --random-range-ratio {text}: {why}") from error


def _random(number: _Numbers, tool: str) -> dict[str, Any]:
    """Return the length distributions of the dataset ``random``."""
    # The lengths include a shared prefix.
    default = 128 if tool == "vllm" else 1024
    shared = number("--random-prefix-len", 0)
    prompt = number("--input-len", number("--random-input-len", number("--random-input", 1024)))
    output = number(
        "--output-len", number("--random-output-len", number("--random-output", default))
    )
    inputs, outputs = number.ratio()
    span = _around if tool == "vllm" else _up_to
    found = {"prompt_tokens": span(prompt, inputs, shared), "output_tokens": span(output, outputs)}
    return {**found, **({"prefix_group": "shared", "prefix_tokens": shared} if shared else {})}


def _around(length: int, ratio: float, shared: int = 0) -> Any:
    """Return a distribution of lengths from ``1 - ratio`` to ``1 + ratio`` times ``length``.

    ``shared`` is added to each length.
    """
    if not ratio:
        return length + shared
    if not shared:
        return {"distribution": "random", "len": length, "range_ratio": ratio}
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return {"distribution": "uniform", "low": max(low, 1) + shared, "high": high + shared}


def _up_to(length: int, ratio: float, shared: int = 0) -> Any:
    """Return a distribution of lengths from ``ratio`` times ``length`` to ``length``, as in SGLang.

    ``shared`` is added to each length.
    """
    low = max(int(length * ratio), 1)
    if low >= length:
        return length + shared
    return {"distribution": "uniform", "low": low + shared, "high": length + shared}


def _sonnet(number: _Numbers, _tool: str) -> dict[str, Any]:
    return {
        "prompt_tokens": number("--sonnet-input-len", number("--input-len", 550)),
        "output_tokens": number("--sonnet-output-len", number("--output-len", 150)),
        "prefix_group": "sonnet",
        "prefix_tokens": number("--sonnet-prefix-len", 200),
    }


def _repeated(number: _Numbers, _tool: str) -> dict[str, Any]:
    shared = number("--prefix-repetition-prefix-len", 256)
    return {
        "prompt_tokens": shared + number("--prefix-repetition-suffix-len", 256),
        "output_tokens": number("--prefix-repetition-output-len", number("--output-len", 128)),
        "prefix_groups": number("--prefix-repetition-num-prefixes", 10),
        "prefix_tokens": shared,
    }


def _grouped(number: _Numbers, _tool: str) -> dict[str, Any]:
    shared = number("--gsp-system-prompt-len", 2048)
    groups = number("--gsp-num-groups", 64)
    return {
        "prompt_tokens": shared + number("--gsp-question-len", 128),
        "output_tokens": number("--gsp-output-len", 256),
        "prefix_groups": groups,
        "prefix_tokens": shared,
        "num_prompts": groups * number("--gsp-prompts-per-group", 16),
    }


def _of_file(
    dataset: str, values: Mapping[str, Any], number: Callable[[str, Any], Any], option: str
) -> dict[str, Any]:
    """Return a workload that replays the dataset file."""
    # The file must have lengths in tokens.
    path = Path(str(values.get("--dataset-path", "")))
    if dataset not in ("mooncake", "timed_trace") or not path.is_file():
        raise InputError(
            f"{option}: --dataset-name {dataset}: simkv cannot determine the lengths of its "
            "requests without the dataset and the tokenizer of the model; give --input-len and "
            "--output-len, or a trace with lengths (--trace FILE)"
        )
    found: dict[str, Any] = {"trace": str(path)}
    if "--num-prompts" in values:
        found["limit"] = number("--num-prompts", 1000)
    if "--max-concurrency" in values:
        found["max_concurrency"] = number("--max-concurrency", 1)
    return found
