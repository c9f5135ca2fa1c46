"""From a checked body to requests of the engine, and what can be said of their answers."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote

import numpy as np

from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.core.scheduler_protocol import Refusal
from simkv.serve.error_responses import RequestError
from simkv.serve.live_simulation import ClientRequest, LiveSimulation
from simkv.serve.partial_reply import Reply
from simkv.serve.prompt_prefixes import PromptTree
from simkv.serve.request_bodies import Body
from simkv.serve.served_scenario import SampleLength
from simkv.serve.text_tokenizers import TextTokenizer
from simkv.workload.workload_base import MAX_TOKEN_COUNT

#: The status and the words with which a request ends that is not served to its end.
ERROR_OUTCOMES = {
    Outcome.REJECTED: (400, "the engine refused the request"),
    Outcome.STALLED: (503, "the engine is dead"),
    Outcome.LOST: (503, "the replica that had the request is gone"),
    Outcome.CUT_OFF: (503, "the server was stopped before the answer was complete"),
}
#: Most characters of an unknown model's name that its refusal repeats.
LONGEST_NAME = 256
#: Most characters of a request id: each chunk of a stream repeats it.
LONGEST_ID = 16_384
#: Most bytes of the response header with the id; clients refuse long headers (aiohttp: 8,190).
LONGEST_HEADER = 4096
#: Characters that a header has unchanged; others are percent-encoded.
_PRINTABLE = bytes(range(ord("!"), ord("~") + 1)).decode()


@dataclass(frozen=True)
class ServedModel:
    """What an application knows of the engine that it stands for.

    ``longest`` is the most tokens of prompt and answer together, None where the engine has no such
    limit; ``lengths`` draws how long answers are that may end by themselves, ``loras`` are the
    adapters that clients ask for by their names, or with ``lora_by_model`` by ``model:adapter``.
    """

    engine: str
    variant: str
    model: str
    texts: TextTokenizer
    longest: int | None
    lengths: SampleLength | None
    seed: int = 0
    by_priority: bool = True
    loras: Sequence[str] = ()
    lora_by_model: bool = False

    def adapter(self, model: str | None) -> str | None:
        """The LoRA adapter that a client means by a model's name.

        It is known by its name, with ``lora_by_model`` by ``model:adapter``, too. Raises Refused
        if nothing has the name.
        """
        if not model or model == self.model:
            return None
        name = model.removeprefix(f"{self.model}:") if self.lora_by_model else model
        if name not in self.loras:
            shown = model if len(model) <= LONGEST_NAME else f"{model[:LONGEST_NAME]}…"
            raise RequestError(404, f"The model `{shown}` does not exist.", "model")
        return name


class Generation:
    """One call of a client: its prompts, and the answers to them.

    It is ``called`` as its client says, and ``name`` is the id of the answer; ``model`` gives it.
    """

    def __init__(
        self,
        prefix: str,
        called: str,
        model: str,
        prompts: list[array[int]],
        answers: list[Reply],
    ) -> None:
        self.called, self.name, self.model = called, prefix + called, model
        self.prompts = prompts
        self.answers = answers

    @property
    def headers(self) -> dict[str, str]:
        """The header ``x-request-id``; empty if the id is too long for a header."""
        header = quote(self.called, safe=_PRINTABLE)
        return {"x-request-id": header} if len(header) <= LONGEST_HEADER else {}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.tokens for answer in self.answers)

    def usage(self) -> dict[str, int]:
        """As the API counts."""
        asked, given = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": asked,
            "total_tokens": asked + given,
            "completion_tokens": given,
        }


@dataclass
class RequestHandler:
    """Takes calls: gives their prompts to the engine, and knows them by the names of clients.

    ``names`` are the requests of a call by its name; ``late`` is told by how many seconds a token
    was late when it was written.
    """

    live: LiveSimulation
    front: ServedModel
    names: dict[str, list[int]] = field(default_factory=dict)
    late: Callable[[float], None] = lambda _: None

    def __post_init__(self) -> None:
        self.streamed: set[int] = set()
        self._prompts: dict[int, array[int]] = {}
        self._known = PromptTree()
        self._random = np.random.default_rng(self.front.seed)
        self.in_flight = 0

    def begin(
        self, prefix: str, name: str | None, body: Body, prompts: Sequence[array[int]]
    ) -> Generation:
        """Send the prompts to the engine. Raises Refused where the API would refuse the call.

        A full queue is told of before whatever is wrong with a prompt, as vLLM does (0.33.0,
        ``_preflight``). If one of them is turned away before the engine hears of it, so are all.
        """
        lora = self.front.adapter(body.model)
        if self.live.dead:
            raise RequestError(503, f"the engine is dead: {self.live.dead}")
        called = name or body.request_id or uuid.uuid4().hex
        if len(called) > LONGEST_ID:
            said = f"request_id: expected at most {LONGEST_ID} characters, got {len(called)}"
            raise RequestError(400, said, "request_id")
        self._preflight(called, body, prompts[0], lora)
        if body.n is not None and body.n > 1:
            raise RequestError(400, "n: simkv does not model parallel sampling; expected 1", "n")
        if body.priority and not self.front.by_priority:
            said = "Got priority {} but priority scheduling is not enabled."
            raise RequestError(400, said.format(body.priority), "priority")
        limits = [self._limit(body, len(prompt)) for prompt in prompts]
        answers = [
            self.live.submit(self._ask(body, prompt, limit, lora))
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        self.names[called] = [answer.request.id for answer in answers]
        if refusals := [answer.refusal for answer in answers if answer.refusal]:
            for answer in answers:
                self.live.leave(answer)
            raise _turned_away(refusals[0])
        self._prompts.update(zip(self.names[called], prompts, strict=True))
        if body.stream:
            self.streamed.update(self.names[called])
        self.in_flight += 1
        model = lora or self.front.model
        return Generation(prefix, called, model, list(prompts), answers)

    def _preflight(self, called: str, body: Body, prompt: array[int], lora: str | None) -> None:
        """Raise Refused if all are turned away now, whatever they ask; the first prompt counts."""

        def ask() -> ClientRequest:
            try:
                limit = self._limit(body, len(prompt))
            except RequestError:
                limit = 1
            return self._ask(body, prompt, limit, lora)

        if len(prompt) and (answer := self.live.reject_if_full(ask)):
            self.names[called] = [answer.request.id]
            assert answer.refusal
            raise _turned_away(answer.refusal)

    def end(self, call: Generation) -> None:
        """Nobody waits for a call any more."""
        self.in_flight -= 1
        for prompt, answer in zip(call.prompts, call.answers, strict=True):
            self.live.leave(answer)
            number = answer.request.id
            self.streamed.discard(number)
            del self._prompts[number]
            emitted = self.front.texts.emitted(number, answer.tokens)
            self._known.answer(prompt, emitted, f"o{number}")

    def tokens(self, number: int, count: int) -> array[int]:
        """The first tokens of a request under way: its prompt, and what it emits after that."""
        prompt = self._prompts.get(number, array("q"))
        emitted = self.front.texts.emitted(number, max(count - len(prompt), 0))
        return (prompt + emitted)[:count]

    def sent(self, due: float) -> None:
        """A token was written that was due then."""
        self.late(time.monotonic() - due)

    def find(self, name: str) -> list[int]:
        """The requests of a call, by its id, by what its client called it, or by its number."""
        for prefix in ("", "cmpl-", "chatcmpl-"):
            if name.startswith(prefix) and (known := self.names.get(name.removeprefix(prefix))):
                return known
        number = int(name) if name.isdecimal() and len(name) < 12 else -1
        return [number] if 0 <= number < len(self.live.journal) else []

    def _limit(self, body: Body, prompt: int) -> int:
        """Most tokens of an answer. Raises Refused for what is too long or makes no sense."""
        if prompt == 0:
            raise RequestError(400, "The prompt is empty.", "prompt")
        limit, longest = body.limit, self.front.longest
        if longest is not None:
            limit = max_output_tokens(longest, prompt, limit, body.limit_param)
        elif limit is None:
            limit = self._draw() if self.front.lengths else 16
        if limit < 1:
            raise RequestError(400, f"max_tokens must be at least 1, got {limit}.", "max_tokens")
        if limit > MAX_TOKEN_COUNT:
            said = f"max_tokens must be at most {MAX_TOKEN_COUNT}, got {limit}."
            raise RequestError(400, said, "max_tokens")
        if body.min_tokens > limit:
            said = f"min_tokens must be less than or equal to max_tokens={limit}, "
            raise RequestError(400, f"{said}got {body.min_tokens}.", "min_tokens")
        return limit

    def _ask(self, body: Body, prompt: array[int], limit: int, lora: str | None) -> ClientRequest:
        emits = limit
        if body.simkv.output_tokens is not None:
            emits = body.simkv.output_tokens
        elif not body.ignore_eos and self.front.lengths:
            emits = self._draw()
        return ClientRequest(
            prompt_tokens=len(prompt),
            max_tokens=limit,
            output_tokens=min(max(emits, body.min_tokens, 1), limit),
            segments=partial(self._segments, prompt),
            priority=body.priority,
            ignore_eos=body.ignore_eos,
            lora=lora,
        )

    def _segments(self, prompt: array[int], number: int) -> list[Segment]:
        return self._known.name(prompt, f"u{number}")

    def _draw(self) -> int:
        assert self.front.lengths is not None
        return self.front.lengths(self._random)


def _turned_away(refusal: Refusal) -> RequestError:
    return RequestError(503, refusal.words, kind="Service Unavailable")


def max_output_tokens(longest: int, prompt: int, wanted: int | None, param: str) -> int:
    """Tokens that an answer may have where prompt and answer together have a limit.

    Raises Refused with the words of vLLM 0.33.0 (``vllm/renderers/params.py``).
    """
    if wanted is not None and wanted > longest:
        said = f"{param}={wanted} cannot be greater than max_model_len={longest}. "
        raise RequestError(400, f"{said}Please request fewer output tokens.", param)
    if prompt > longest:
        said = (
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {prompt} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt."
        )
        raise RequestError(400, said, "input_tokens")
    return longest - prompt if wanted is None else min(wanted, longest - prompt)


def id_of(header: str | None) -> str | None:
    """Request id in the header ``x-request-id``, which is UTF-8 where it can be."""
    if header is None:
        return None
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def finish_reason(request: Request, tokens: int, longest: int | None) -> str:
    """Why an answer of so many tokens ended."""
    full = longest is not None and request.prompt_tokens + tokens >= longest
    return "length" if full or tokens >= request.max_tokens else "stop"
