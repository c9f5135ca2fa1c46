"""Admission of whole sessions: a router holds the requests of sessions whose contexts do not fit.

The rules come from ThunderAgent (arXiv 2602.13692; ThunderAgent-org/ThunderAgent,
``scheduler/router.py`` and ``backend/state.py``), which llm-d's router adopts (llm-d/llm-d-router
#2964).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from simkv.core.request import Prompt
from simkv.scenario.fleet_section import PrefixKnowledge, SessionAdmissionConfig


@dataclass(slots=True, eq=False)
class SessionState:
    """State of a session.

    - ``tokens``: length of the session's context in tokens. ``turns``: number of its requests.
    - ``replica``: replica that admitted the session. For a ``paused`` session, this is the last
      replica, or None.
    - ``open``: requests that have not ended. ``held``: requests that the router holds.
    - ``idle_since``: time (s) of the last answer.
    - ``marked``: whether the session is paused when its open requests have ended.
    """

    replica: int | None = None
    tokens: int = 0
    turns: int = 0
    open: set[int] = field(default_factory=set)
    held: dict[int, Prompt] = field(default_factory=dict)
    idle_since: float = 0.0
    paused: bool = False
    marked: bool = False


class SessionAdmission:
    """Router that admits whole sessions.

    It holds the requests of a session whose context does not fit into a replica.
    """

    reads_load = reads_kv = counts_own_sends = False
    knowledge: PrefixKnowledge | None = None

    def __init__(
        self, config: SessionAdmissionConfig, session: Callable[[Prompt], Hashable]
    ) -> None:
        self.config = config
        self._session = session
        self._sessions: dict[Hashable, SessionState] = {}
        self._replicas: list[int] = []
        self._answered = False  # whether a request has ended

    def choose(self, prompt: Prompt, signals: Sequence[object]) -> int:
        """Return the replica of an admitted request."""
        del signals
        replica = self._state(prompt).replica
        assert replica is not None
        return replica

    def forget(self, replica: int) -> None:
        """Pause the sessions of a replica that has failed."""
        self._replicas = [one for one in self._replicas if one != replica]
        for state in self._sessions.values():
            if state.replica == replica:
                state.replica, state.paused, state.marked = None, True, False

    def admits(self, prompt: Prompt, replicas: Iterable[int]) -> bool:
        """Return whether a new request may be sent now. If not, the router holds it."""
        self._replicas = list(replicas)
        state = self._sessions.setdefault(self._session(prompt), SessionState())
        state.turns += 1
        state.open.add(prompt.id)
        share = 1.0 if self._answered else self.config.first_estimate
        state.tokens = int(share * prompt.prompt_tokens)
        if state.turns == 1:
            state.replica = self._place_new(state)
            state.paused = state.replica is None
        if state.paused:
            state.held[prompt.id] = prompt
        return not state.paused

    def _place_new(self, new: SessionState) -> int | None:
        """Return the replica with the most room for a new session, or None."""
        # The result is None if another session is paused or no replica has room.
        if any(state.paused for state in self._sessions.values()):
            return None
        room = {one: self._room(one, exclude=new) for one in self._replicas}
        fitting = [one for one in self._replicas if room[one] >= self._needs(new)]
        return max(fitting, key=room.__getitem__, default=None)

    def ended(self, prompt: Prompt, tokens: int, now: float) -> None:
        """Record that a request has ended. ``tokens`` is the total length of prompt and answer."""
        state = self._sessions.get(self._session(prompt))
        if state is None or prompt.id not in state.open:
            return  # the client left before any replica was ready
        self._answered = True
        state.open.discard(prompt.id)
        state.held.pop(prompt.id, None)
        state.tokens = tokens
        if not state.open:
            state.idle_since = now
            if state.marked:
                state.marked, state.paused = False, True

    def check(self, now: float) -> list[Prompt]:
        """Resume and pause sessions. Return the requests that are no longer held."""
        sent = self._resume(now)
        for replica in self._replicas:
            self._pause(replica)
        return sent

    def force(self, prompt: Prompt) -> list[Prompt]:
        """Resume the session of a request that was held for too long.

        Returns all held requests of the session.
        """
        # The result is empty if the request is no longer held, or if there is no replica.
        state = self._state(prompt)
        if prompt.id not in state.held or not self._replicas:
            return []
        if state.replica is None:
            state.replica = min(self._replicas, key=lambda one: len(self._active(one)))
        return self._release(state, state.replica)

    def _resume(self, now: float) -> list[Prompt]:
        """Resume the paused sessions that fit and return their requests."""
        # Later turns come first, then new sessions, then idle ones, each group by size. The largest
        # of them goes to the replica with the most room.
        buffer = self.config.buffer_tokens
        room = {one: self._room(one, now) for one in self._replicas}
        room = {one: tokens for one, tokens in room.items() if tokens > buffer}
        left, chosen = sum(room.values()), []
        paused = [state for state in self._sessions.values() if state.paused]
        for state in sorted(paused, key=lambda state: (self._rank(state), state.tokens)):
            if self._needs(state) <= left:
                chosen.append(state)
                left -= self._needs(state)
        sent: list[Prompt] = []
        for state in sorted(chosen, key=lambda state: -state.tokens):
            largest = max(room, key=room.__getitem__, default=None)
            if largest is not None and self._needs(state) <= room[largest]:
                sent += self._release(state, largest)
                room[largest] -= self._needs(state)
        return sent

    @staticmethod
    def _rank(state: SessionState) -> int:
        return 1 if state.turns == 1 else 0 if state.held else 2

    def _release(self, state: SessionState, replica: int) -> list[Prompt]:
        state.replica, state.paused = replica, False
        held = list(state.held.values())
        state.held.clear()
        return held

    def _pause(self, replica: int) -> None:
        """Pause idle sessions, smallest first, until the others fit."""
        # If the sessions still do not fit, all busy sessions are marked.
        active = sorted(self._active(replica), key=lambda state: state.tokens)
        for state in (state for state in active if not state.open):
            if self._room(replica) >= 0:
                return
            state.paused = True
        if self._room(replica) < 0:
            for state in active:
                state.marked |= bool(state.open)

    def _active(self, replica: int) -> list[SessionState]:
        states = self._sessions.values()
        return [one for one in states if one.replica == replica and not one.paused]

    def _needs(self, state: SessionState) -> int:
        return state.tokens + self.config.buffer_tokens

    def _room(
        self, replica: int, now: float | None = None, exclude: SessionState | None = None
    ) -> float:
        """Return the capacity (tokens) of a replica that its sessions do not need."""
        # With ``now``, the tokens of idle sessions decay with the half-life of the settings.
        half_life, used = self.config.half_life, 0.0
        for state in self._active(replica):
            if state is exclude:
                continue
            weight = 1.0
            if now is not None and half_life is not None and not state.open:
                weight = 2.0 ** -((now - state.idle_since) / half_life)
            used += weight * state.tokens + self.config.buffer_tokens
        return self.config.capacity_tokens - used

    def _state(self, prompt: Prompt) -> SessionState:
        return self._sessions[self._session(prompt)]
