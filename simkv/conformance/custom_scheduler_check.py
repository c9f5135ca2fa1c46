"""Check with random scenarios that a custom scheduler obeys the laws (the invariants of every
scheduler).

Example:

    found = check_laws(Path("fcfs.py"), examples=200)
    found.counterexample    # None, or the smallest scenario found that breaks a law, as plain data
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from simkv.core.errors import InputError
from simkv.metrics.purity_check import check_scheduler_run
from simkv.scenario.custom.code_source import line_of_method, load_from_file, override_trust
from simkv.scenario.custom.scheduler_laws import LawViolation
from simkv.scenario.scenario import Scenario

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: Seed of the search, so that a check is reproducible.
SEED = 20
#: Number of scenarios that are rerun in two processes with different string hash seeds, because the
#: iteration order of a set of strings depends on this seed.
RERUN_SCENARIOS = 20
HASH_SEEDS = ("1", "2")


@dataclass
class CheckResult:
    """Result of a check: the number of scenarios that were run, and the violated invariant, if any.

    ``counterexample`` is a scenario that violates the invariant, as plain data. ``knobs`` are the
    engine settings that the user fixed.
    """

    scenarios: int = 0
    broken: LawViolation | None = None
    counterexample: dict[str, Any] | None = None
    knobs: dict[str, Any] = field(default_factory=dict)

    def to_yaml(self, out: Path) -> str:
        """Return the counterexample as the text of a scenario file to be saved at ``out``."""
        assert self.counterexample is not None
        engine = self.counterexample["engine"]
        beside = Path(os.path.relpath(engine["file"], out.resolve().parent)).as_posix()
        text = io.StringIO()
        broken = " ".join(str(self.broken).split())
        text.write(f"# simkv check-scheduler {out.name} --trust\n# {broken}\n")
        YAML().dump({**self.counterexample, "engine": {**engine, "file": beside}}, text)
        return text.getvalue()


def check_laws(file: Path, examples: int = 200, knobs: dict[str, Any] | None = None) -> CheckResult:
    """Run random scenarios with the scheduler in ``file`` until one violates an invariant.

    At most ``examples`` scenarios are sampled, and a violating scenario is simplified. The code in
    ``file`` is executed. ``knobs`` are fixed engine settings. Raises InputError if the file
    contains no scheduler or if Hypothesis is not installed.
    """
    try:
        import hypothesis
    except ImportError as error:
        raise InputError("check-scheduler needs Hypothesis: pip install 'simkv[own]'") from error
    found = CheckResult(knobs=knobs or {})
    with override_trust(True):
        # this raises an error for an invalid file
        _scenario(file, {**_PLAIN, "engine": {}}, found.knobs)

        drawn_trees: list[dict[str, Any]] = []

        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=examples,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(_drawn())
        def keeps_the_laws(drawn: dict[str, Any]) -> None:
            found.scenarios += 1
            tree, scenario = _scenario(file, drawn, found.knobs)
            drawn_trees.append(tree)
            try:
                check_scheduler_run(scenario, Path())
            except LawViolation as error:
                found.broken, found.counterexample = error, tree
                raise

        try:
            keeps_the_laws()
        except LawViolation:
            pass
        # the law was violated only once, so the scheduler is nondeterministic
        except hypothesis.errors.Flaky:
            assert found.broken is not None
    if found.broken is None:
        _hash_otherwise(file, found, drawn_trees)
    return found


def _hash_otherwise(file: Path, found: CheckResult, trees: list[dict[str, Any]]) -> None:
    """Run the largest scenarios again in processes with different string hash seeds.

    If the outcome of a request depends on the hash seed, this is stored in ``found`` as a
    violation.
    """
    crowded = sorted(trees, key=lambda tree: -len(tree["workload"]["requests"]))[:RERUN_SCENARIOS]
    scenarios = json.dumps(crowded)
    command = [
        sys.executable,
        "-Wignore::FutureWarning:simkv.own",  # this process has already shown the warning
        # exclude the current directory from imports; the option -I would also ignore PYTHONHASHSEED
        "-P",
        "-c",
        "import sys; from simkv.conformance.custom_scheduler_check import run_outcomes; "
        "outcomes = run_outcomes(sys.stdin.read()); print(); print(outcomes)",
    ]
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[2])])
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in HASH_SEEDS
    ]
    # Read only the last line, because the scheduler may print text before it.
    one, other = (json.loads(run.communicate(scenarios)[0].splitlines()[-1]) for run in running)
    for tree, a, b in zip(crowded, one, other, strict=True):
        if a != b:
            first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            what = (
                f"with PYTHONHASHSEED={HASH_SEEDS[0]} request {first} {a[first]}, with "
                f"{HASH_SEEDS[1]} "
            )
            with override_trust(True):
                of, source = load_from_file(file.resolve(), _name(file))
            line = line_of_method(of, source.path, "schedule")
            found.broken = LawViolation("chance", what + b[first], source.shown, line, None)
            found.counterexample = tree
            return


def run_outcomes(scenarios: str) -> str:
    """Run a JSON array of scenarios and return the outcomes of all requests as JSON."""
    outcomes = []
    with override_trust(True):
        for tree in json.loads(scenarios):
            scenario = Scenario.model_validate(tree, context={"folder": Path()})
            try:
                lives = check_scheduler_run(scenario, Path()).requests.values()
            except LawViolation as error:
                outcomes.append([f"{error}"] * len(tree["workload"]["requests"]))
            else:
                outcomes.append([f"{life.outcome} at {life.ended_at} s" for life in lives])
    return json.dumps(outcomes)


_PLAIN: dict[str, Any] = {"requests": [{"prompt_tokens": 1, "output_tokens": 1}]}


def _scenario(
    file: Path, drawn: dict[str, Any], knobs: dict[str, Any]
) -> tuple[dict[str, Any], Scenario]:
    """Return a sampled scenario as plain data and as a validated ``Scenario``.

    Raises InputError if the scheduler or an engine setting is invalid.
    """
    tree = {
        "name": "counterexample",
        "workload": {"requests": drawn["requests"]},
        "engine": {"name": _name(file), "file": str(file.resolve()), **drawn["engine"], **knobs},
        "profile": "unit-step",
    }
    from pydantic import ValidationError

    try:
        return tree, Scenario.model_validate(tree, context={"folder": Path()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{file}: {first.get('ctx', {}).get('why', first['msg'])}") from error


def _name(file: Path) -> str:
    return file.stem.replace("_", "").lower() or "own"


def _drawn() -> SearchStrategy[dict[str, Any]]:
    """Return a strategy that samples up to eight short requests and a small KV cache.

    Small scenarios suffice to break any law.
    """
    from hypothesis import strategies as st

    request = st.fixed_dictionaries(
        {
            "prompt_tokens": st.integers(1, 30),
            "output_tokens": st.integers(1, 16),
        },
        optional={
            "arrival": st.sampled_from([0.3, 1.0, 2.5, 9.0, 40.0]),
            "max_tokens": st.integers(16, 24),
            "timeout": st.sampled_from([3.0, 12.0, 60.0]),
            "priority": st.integers(0, 2),
        },
    )
    engine = st.fixed_dictionaries(
        {"num_blocks": st.integers(2, 40), "block_size": st.sampled_from([4, 1, 2, 8])},
        optional={
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.integers(4, 64),
        },
    )
    return st.fixed_dictionaries(
        {"requests": st.lists(request, min_size=1, max_size=8), "engine": engine}
    )
