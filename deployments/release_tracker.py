"""Follows the released tokens of one response and says at its end which targets it met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.protocol import End, Outcome, Promise
from deployments.slo_ledger import Histogram, edges_us


@dataclass(slots=True)
class _Choice:
    released: int = 0
    last_us: int = 0


@dataclass(slots=True)
class ReleaseTracker:
    """Times are the request's age, in microseconds since it arrived at the gateway.

    Each choice of a request has its own gaps and deadlines. Tokens that leave in one piece leave at the same time:
    the first of them ends a gap, the others follow with gaps of 0. A response that is not streamed brings the tokens of
    all ``choices`` at once. ``on_first(ttft_us)`` and ``on_gap(gap_us, count)`` hear each measured time.
    """

    service: str
    promise: Promise
    streamed: bool
    choices: int = 1
    on_first: Callable[[int], None] | None = None
    on_gap: Callable[[int, int], None] | None = None
    tokens: int = 0
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _ttft_us: int | None = None
    _gaps: int = 0
    _late_gaps: int = 0
    _late_tokens: int = 0
    _max_gap_us: int = 0
    _histogram: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self._histogram = Histogram(edges_us(self.promise.tbt_us))

    def released(self, age_us: int, tokens: int, index: int = 0) -> None:
        """``tokens`` tokens of choice ``index`` went to the client at ``age_us``."""
        if tokens <= 0:
            return
        if not self.streamed:
            self.tokens += tokens
            longest = -(-self.tokens // self.choices)
            deadline_us = self.promise.ttft_us + (longest - 1) * self.promise.tbt_us
            self._late_tokens = int(age_us > deadline_us)
            return
        choice = self._choices.setdefault(index, _Choice())
        if self._ttft_us is None:
            self._ttft_us = age_us
            if self.on_first is not None:
                self.on_first(age_us)
        if choice.released:
            self._gap(age_us - choice.last_us, 1)
        if tokens > 1:
            self._gap(0, tokens - 1)
        self._late_tokens += self._late(choice.released, tokens, age_us)
        choice.released += tokens
        choice.last_us = age_us
        self.tokens += tokens

    def outcome(self, end: End) -> Outcome:
        """The account of the response as it ended."""
        return Outcome(
            service=self.service,
            end=end,
            streamed=self.streamed,
            ttft_us=self._ttft_us,
            ttft_met=self._ttft_us is not None and self._ttft_us <= self.promise.ttft_us,
            tokens=self.tokens,
            gaps=self._gaps,
            late_gaps=self._late_gaps,
            late_tokens=self._late_tokens,
            max_gap_us=self._max_gap_us,
            gap_counts=tuple(self._histogram.counts) if self._gaps else (),
        )

    def _gap(self, gap_us: int, count: int) -> None:
        self._gaps += count
        self._max_gap_us = max(self._max_gap_us, gap_us)
        for _ in range(count):
            self._histogram.observe(gap_us)
        if gap_us > self.promise.tbt_us:
            self._late_gaps += count
        if self.on_gap is not None:
            self.on_gap(gap_us, count)

    def _late(self, first: int, tokens: int, age_us: int) -> int:
        """How many of tokens first .. first+tokens-1 missed arrival + TTFT + i * TBT when released at ``age_us``."""
        overdue_us = age_us - self.promise.ttft_us
        if overdue_us <= 0:
            return 0
        kept_from = -(-overdue_us // self.promise.tbt_us)
        return max(0, min(tokens, kept_from - first))
