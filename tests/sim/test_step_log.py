"""Tests of the step log: rows that repeat a step form a run and read like single rows."""

from array import array

from simkv.costs.step_load import StepLoad
from simkv.sim.step_log import COLUMNS, QueueState, StepLog


def log() -> StepLog:
    """Return a log with a prefill, a decode that a pipelined engine repeats three times, and
    another decode."""
    found = StepLog()
    found.append((0.0, 0.0, 1.0), "prefill", StepLoad(2, 30, 0, 0, 0), 0, QueueState(4, 2, 90))
    found.append((0.5, 1.0, 1.5), "decode", StepLoad(0, 0, 0, 2, 30), 1, QueueState(4, 3, 80))
    found.repeat(array("d", [2.0, 2.5, 3.0]), [80, 79, 79], 2)
    found.append((2.6, 3.0, 4.0), "decode", StepLoad(0, 0, 0, 1, 30), 2, QueueState(0, 1, 85))
    return found


ROWS = {
    "decided": [0.0, 0.5, 1.0, 1.5, 2.0, 2.6],
    "start": [0.0, 1.0, 1.5, 2.0, 2.5, 3.0],
    "end": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "kind": ["prefill", *["decode"] * 5],
    "prefill_seqs": [2, 0, 0, 0, 0, 0],
    "prefill_tokens": [30, 0, 0, 0, 0, 0],
    "decode_seqs": [0, 2, 2, 2, 2, 1],
    "preempted": [0, 1, 0, 0, 0, 2],
    "waiting": [4, 4, 4, 4, 4, 0],
    "running": [2, 3, 3, 3, 3, 1],
    "free_blocks": [90, 80, 80, 79, 79, 85],
}


def test_run_expands_to_rows() -> None:
    assert {name: list(getattr(log(), name)) for name in COLUMNS} == ROWS
    assert len(log()) == 6


def test_logs_compare_by_rows() -> None:
    stepped = log()
    stepped.append((3.0, 4.0, 5.0), "decode", StepLoad(0, 0, 0, 1, 31), 0, QueueState(0, 1, 85))
    leapt = log()
    assert leapt != stepped
    leapt.repeat(array("d", [5.0]), [85], 2)
    assert leapt == stepped


def test_expanded_columns_grow_with_new_rows() -> None:
    read = log()
    for name in COLUMNS:
        getattr(read, name)
    read.repeat(array("d", [5.0, 6.0]), [85, 84], 1)
    new = {
        "decided": [4.0, 5.0],
        "start": [4.0, 5.0],
        "end": [5.0, 6.0],
        "kind": ["decode"] * 2,
        "prefill_seqs": [0, 0],
        "prefill_tokens": [0, 0],
        "decode_seqs": [1, 1],
        "preempted": [0, 0],
        "waiting": [0, 0],
        "running": [1, 1],
        "free_blocks": [85, 84],
    }
    whole = {name: ROWS[name] + new[name] for name in COLUMNS}
    assert {name: list(getattr(read, name)) for name in COLUMNS} == whole


def test_extend_appends_rows_of_other_log() -> None:
    both = log()
    both.extend(log())
    assert {name: list(getattr(both, name)) for name in COLUMNS} == {
        name: ROWS[name] * 2 for name in COLUMNS
    }


def test_forget_drops_whole_runs_and_keeps_row_numbers() -> None:
    cut = log()
    assert cut.forget(0) == 0
    assert cut.forget(4) == 1  # row 4 belongs to the run that begins with row 1
    assert (len(cut), cut.dropped) == (6, 1)
    assert {name: list(getattr(cut, name)) for name in COLUMNS} == {
        name: ROWS[name][1:] for name in COLUMNS
    }
    assert cut.forget(5) == 4
    cut.append((3.5, 4.0, 5.0), "decode", StepLoad(0, 0, 0, 1, 31), 0, QueueState(0, 1, 85))
    cut.repeat(array("d", [6.0]), [84], 2)
    assert (len(cut), cut.dropped) == (8, 5)
    assert list(cut.decided) == [2.6, 3.5, 4.0]
    assert list(cut.start) == [3.0, 4.0, 5.0]
    assert list(cut.preempted) == [2, 0, 0]
