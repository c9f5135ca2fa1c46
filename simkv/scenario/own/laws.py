"""The laws that a scheduler of one's own must keep, watched call by call.

A ``Watched`` scheduler does what the inner one does until it breaks a law; then it raises
``LawBroken``, which names the law, the step and the line, and ends the run without a figure.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from simkv.core.blocks import BlockPool
from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler import Batch, Completion, blocks_for
from simkv.scenario.own.reads import files_read
from simkv.scenario.own.source import OwnCode, line_of

Answer = TypeVar("Answer")

#: The laws by what breaks them, in words.
LAWS = {
    "exceptions": "no call raises an exception",
    "answers": "every call answers, with what the protocol says",
    "requests": "a request is in one queue, once, until it ends, and a step has it once",
    "tokens": "a step computes tokens that are there, on top of those that have KV, and sends one "
    "for each request that is complete",
    "blocks": "free and held blocks are all blocks, and who computes holds enough",
    "limits": "no more run than max_num_seqs, and a step computes max_num_batched_tokens at most",
    "future": "what will come decides nothing",
    "chance": "the same scenario comes out the same",
    "leaps": "leaping changes nothing",
    "ends": "every run ends",
}
#: Seconds after which a call counts as never answering.
PATIENCE = 10.0
#: Decisions in a row that bring nobody a token although there is something to do.
MOST_IDLE = 20_000


class LawBroken(InputError):
    """A scheduler broke a ``law`` in the decision numbered ``step``; ``line`` is of its file."""

    def __init__(self, law: str, what: str, path: str, line: int, step: int | None) -> None:
        super().__init__(law, what, path, line, step)  # SimPy and pickle make it again of these
        self.law, self.what, self.path, self.line, self.step = law, what, path, line, step

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        law = f"breaks the law of {self.law}{at}"
        return f"{self.path}:{self.line}: {law}: {self.what} ({LAWS[self.law]})"


class _Late(BaseException):
    """A call takes too long; not to be caught by what it interrupts."""


@dataclass(slots=True)
class _Known:
    """What is known of a request without asking the scheduler."""

    prompt: Prompt
    computed: int = 0
    emitted: int = 0


class Watched:
    """A scheduler under watch; see ``simkv.core.scheduler.Scheduler`` for what it offers."""

    def __init__(self, build: Callable[[], Any], of: type[Any], source: OwnCode) -> None:
        self._of, self._source = of, source
        self.step = 0
        #: What was decided, a number a step, with requests numbered from the first that came; and
        #: the step at which each request was over.
        self.trail: list[int] = []
        self.over: dict[int, int] = {}
        self.leapt = False
        self._first: int | None = None
        self._idle = 0
        self._known: dict[int, _Known] = {}
        self.inner = self._call("__init__", build)
        # An engine of simkv under a rule has its own laws; pipelines are not followed by tokens.
        ours = any(base.__module__.startswith("simkv.schedulers.") for base in of.__mro__)
        self._follows = not ours and getattr(self.inner, "pipeline_depth", 1) == 1
        self._ours = ours

    # What is asked of it.

    @property
    def pipeline_depth(self) -> int:
        """Batches in flight."""
        return int(getattr(self.inner, "pipeline_depth", 1))

    def add(self, prompt: Prompt) -> None:
        """Take a new request, of which no more is shown than a client sends."""
        seen = Prompt(*(getattr(prompt, field.name) for field in fields(Prompt)))
        self._known[prompt.id] = _Known(seen)
        self._first = prompt.id if self._first is None else self._first
        self._call("add", lambda: self.inner.add(seen))

    def schedule(self) -> Batch:
        """Decide, and be judged."""
        self.step += 1
        batch: Batch = self._call("schedule", self.inner.schedule)
        self._expect(isinstance(batch, Batch), "answers", f"found {batch!r}, expected a Batch")
        self._judge_rows(batch)
        self._judge_limits(batch)
        for i in {*batch.ignored, *batch.lost}:
            self._known.pop(i, None)
        self._judge_state()
        first = self._first or 0
        rows = tuple((i - first, n) for i, n in batch.scheduled)
        moved = (*batch.joined, -1, *batch.left, -1, *batch.preempted, -1, *batch.ignored)
        self.trail.append(hash((rows, tuple(i - first if i >= 0 else None for i in moved))))
        self._idle = 0 if batch.emits or batch.decodes or not self._known else self._idle + 1
        what = f"{self._idle} decisions in a row brought nobody a token"
        self._expect(self._idle < MOST_IDLE, "ends", what)
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Account for a step, and be judged."""
        completion: Completion = self._call("complete", lambda: self.inner.complete(batch, ended))
        good = isinstance(completion, Completion)
        self._expect(good, "answers", f"found {completion!r}, expected a Completion", "complete")
        for i in completion.delivered:
            if i in self._known:
                self._known[i].emitted += 1
        if self._follows:
            self._judge_completion(batch, ended, completion)
        for i in completion.finished:
            self._known.pop(i, None)
            self.over[i] = self.step
        self._judge_state("complete")
        return completion

    def abort(self, request_id: int) -> None:
        """The client has gone."""
        self._call("abort", lambda: self.inner.abort(request_id))
        self._known.pop(request_id, None)
        self.over[request_id] = self.step
        self._judge_state("abort")

    def leap(self, most: int) -> int:
        """How many steps are alike."""
        steps = self._call("leap", lambda: self.inner.leap(most))
        good = isinstance(steps, int) and 1 <= steps <= most
        self._expect(good, "leaps", f"found {steps!r}, expected 1 to {most}", "leap")
        return int(steps)

    def skip(self, steps: int) -> list[int]:
        """Do that many alike."""
        free = self._call("skip", lambda: self.inner.skip(steps))
        good = isinstance(free, list) and len(free) == steps
        self._expect(good, "leaps", f"found {free!r}, expected {steps} numbers", "skip")
        self.step += steps
        self.leapt = True
        held = self.running_ids()
        for i in held:
            if self._follows and i in self._known:
                self._known[i].computed += steps
                self._known[i].emitted += steps
        return list(free)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return int(self._call("num_blocks", lambda: self.inner.num_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had."""
        return int(self._call("free_blocks", lambda: self.inner.free_blocks))

    @property
    def num_waiting(self) -> int:
        """Length of the queue."""
        return int(self._call("num_waiting", lambda: self.inner.num_waiting))

    @property
    def num_running(self) -> int:
        """How many run."""
        return int(self._call("num_running", lambda: self.inner.num_running))

    def waiting_ids(self) -> list[int]:
        """Who waits."""
        return list(self._call("waiting_ids", self.inner.waiting_ids))

    def running_ids(self) -> list[int]:
        """Who runs."""
        return list(self._call("running_ids", self.inner.running_ids))

    def blocks_held(self) -> Mapping[int, int]:
        """Blocks by request."""
        return dict(self._call("blocks_held", self.inner.blocks_held))

    def fingerprint(self) -> Hashable:
        """All that decides what comes next."""
        found: Hashable = self._call("fingerprint", self.inner.fingerprint)
        return found

    # How it is judged.

    def _judge_rows(self, batch: Batch) -> None:
        ids = [i for i, _ in batch.scheduled]
        for i in {i for i in ids if ids.count(i) > 1} if len(set(ids)) < len(ids) else ():
            self._break("requests", f"request {i} stands {ids.count(i)} times in one step")
        if self._ours:
            return
        for i in (*ids, *batch.emits, *batch.preempted):
            self._expect(i in self._known, "requests", f"there is no request {i!r} any more")
        for i in batch.preempted:
            self._known[i].computed = 0
        if not self._follows or batch.decodes:
            return
        same = len(batch.context) == len(ids)
        self._expect(same, "answers", f"{len(ids)} scheduled, {len(batch.context)} contexts")
        emits = set()
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
            known = self._known[i]
            length = known.prompt.prompt_tokens + known.emitted
            told = f"request {i} has {known.computed} of {length} tokens computed"
            self._expect(context == known.computed, "tokens", f"{told}; the step says {context}")
            good = isinstance(tokens, int) and 1 <= tokens <= length - context
            self._expect(good, "tokens", f"{told}; the step computes {tokens!r} more")
            known.computed += tokens
            if known.computed == length:
                emits.add(i)
        for i in emits ^ set(batch.emits):
            what = "gets no token" if i in emits else "gets a token before it is complete"
            self._break("tokens", f"request {i} {what}")

    def _judge_limits(self, batch: Batch) -> None:
        config = getattr(self.inner, "config", None)
        if self._ours or config is None:
            return
        tokens = sum(n for _, n in batch.scheduled) + batch.decodes
        most, seats = config.max_num_batched_tokens, config.max_num_seqs
        self._expect(tokens <= most, "limits", f"the step computes {tokens} of {most} tokens")
        self._expect(self.num_running <= seats, "limits", f"{self.num_running} of {seats} run")

    def _judge_completion(
        self, batch: Batch, ended: Collection[int], completion: Completion
    ) -> None:
        for i in set(completion.delivered) ^ set(batch.emits):
            self._break("tokens", f"request {i} and its token do not belong together", "complete")
        limits = {i for i in batch.emits if self._at_limit(i)}
        for i in set(completion.finished) ^ (set(ended) & set(batch.emits) | limits):
            what = "ends before its last token" if i in completion.finished else "goes on after it"
            self._break("requests", f"request {i} {what}", "complete")

    def _at_limit(self, i: int) -> bool:
        known = self._known.get(i)
        return known is not None and known.emitted >= known.prompt.max_tokens

    def _judge_state(self, call: str = "schedule") -> None:
        if self._ours:
            return
        queues = [*self.waiting_ids(), *self.running_ids()]
        if sorted(queues) != sorted(self._known):
            twice = [i for i in set(queues) if queues.count(i) > 1]
            gone = sorted(self._known.keys() - set(queues))
            more = sorted(set(queues) - self._known.keys())
            what = (
                f"request {twice[0]} stands twice in the queues"
                if twice
                else f"request {gone[0]} is in no queue"
                if gone
                else f"request {more[0]} has ended and is in a queue"
            )
            self._break("requests", what, call)
        pool = getattr(self.inner, "pool", None)
        if isinstance(pool, BlockPool):
            try:
                pool.check()
            except AssertionError as error:
                self._break("blocks", str(error), call)
        held, free, total = self.blocks_held(), self.free_blocks, self.num_blocks
        if not self._follows:
            return
        good = sum(held.values()) + free == total and free >= 0
        self._expect(
            good, "blocks", f"{sum(held.values())} held and {free} free are not {total}", call
        )
        size: int = getattr(getattr(self.inner, "config", None), "block_size", 0)
        for i, known in self._known.items():
            if not size:
                break
            least = blocks_for(known.computed, size)
            what = f"request {i} has {known.computed} tokens in {held.get(i, 0)} blocks of {size}"
            self._expect(held.get(i, 0) >= least, "blocks", what, call)

    # How what is wrong is told.

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        try:
            with _in_time(), files_read() as read:
                answer = call()
        except LawBroken:
            raise
        except _Late as late:
            line = line_of(late, self._source.path) or self._line(name)
            what = f"{name} took more than {PATIENCE:g} s"
            raise LawBroken("answers", what, self._source.shown, line, self.step) from None
        except (Exception, SystemExit) as error:
            line = line_of(error, self._source.path) or self._line(name)
            what = f"{name} raised {type(error).__name__}: {error}"
            law = "future" if "output_tokens" in str(error) else "exceptions"
            raise LawBroken(law, what, self._source.shown, line, self.step) from error
        if read and name != "__init__":
            self._break("future", f"{name} reads {read[0]}", name)
        return answer

    def _expect(self, good: bool, law: str, what: str, call: str = "schedule") -> None:
        if not good:
            self._break(law, what, call)

    def _break(self, law: str, what: str, call: str = "schedule") -> None:
        raise LawBroken(law, what, self._source.shown, self._line(call), self.step)

    def broken(self, law: str, what: str, step: int | None) -> LawBroken:
        """What is found out by comparing it with another that had the same to do."""
        return LawBroken(law, what, self._source.shown, self._line("schedule"), step)

    def _line(self, name: str) -> int:
        return line_of_method(self._of, self._source.path, name)


def line_of_method(of: type[Any], path: str, name: str) -> int:
    """Where a class says what a call does; ``schedule`` may be written as ``decide``."""
    for one in (name, "decide", "schedule"):
        found = getattr(of, one, None)
        code = getattr(getattr(found, "fget", found), "__code__", None)
        if code is not None and code.co_filename == path:
            return int(code.co_firstlineno)
    return 1


@contextmanager
def _in_time() -> Iterator[None]:
    """Interrupt what takes longer than PATIENCE, where that can be done: in the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(
        signal.ITIMER_REAL
    ) != (0.0, 0.0):
        yield
        return

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
