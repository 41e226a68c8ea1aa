"""Progress of a load run: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status

from benchmarks.attainment import Observation, Targets, report

LINE_EVERY_US = 15_000_000


class Progress:
    """Shows how far a run is and what was kept so far."""

    def __init__(
        self, console: Console, title: str, total: int, targets: Mapping[str, Targets], tolerance_us: int
    ) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._targets = targets
        self._tolerance_us = tolerance_us
        self._status: Status | None = None
        self._next_line_us = LINE_EVERY_US

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status(self._title)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, observations: Sequence[Observation], active: int, now_us: int) -> None:
        """Show the state at ``now_us`` after the start."""
        if self._status is None and now_us < self._next_line_us:
            return
        ended = [observation for observation in observations if observation.ended_us]
        overall = report(ended, self._targets, max(now_us, 1) / 1e6, self._tolerance_us)["all"]
        text = (
            f"{self._title} {now_us / 1e6:.0f} s: {len(ended)} of {self._total} answered, {active} open, "
            f"TTFT met {percent(overall.ttft_met)}, TBT met {percent(overall.tbt_met)}, {overall.failed} failed"
        )
        if self._status is not None:
            self._status.update(text)
            return
        self._next_line_us = now_us + LINE_EVERY_US
        self._console.print(text, highlight=False, soft_wrap=True)


def percent(share: float | None) -> str:
    """``0.987`` as ``98.7 %``; a dash for nothing."""
    return "-" if share is None else f"{100 * share:.1f} %"
