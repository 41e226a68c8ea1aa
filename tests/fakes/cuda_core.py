"""``cuda.core`` as far as `vllm_plugin.green_contexts` uses it (1.2): a driver that hands out disjoint SMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class SMResourceOptions:
    """Same fields as cuda.core's."""

    count: Any = None
    coscheduled_sm_count: Any = None
    preferred_coscheduled_sm_count: Any = None
    backfill: Any = False


@dataclass
class ContextOptions:
    """Same field as cuda.core's."""

    resources: Any


class CUDAError(Exception):
    """As cuda.core raises for a failing driver call."""


@dataclass
class SMResource:
    """SMs by number. ``aligned``: the only alignment the driver takes; a request is rounded up to ``rounds_to``."""

    numbers: tuple[int, ...]
    min_partition_size: int = 2
    coscheduled_alignment: int = 2
    aligned: int = 2
    rounds_to: int = 1
    fails: bool = False

    @property
    def sm_count(self) -> int:
        return len(self.numbers)

    def split(self, options: SMResourceOptions, *, dry_run: bool = False) -> tuple[list[SMResource], SMResource]:
        groups, start = [], 0
        for wanted, alignment in zip(options.count, options.coscheduled_sm_count, strict=True):
            if alignment % self.aligned or wanted % self.aligned or wanted < self.min_partition_size:
                raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
            given = -(-wanted // self.rounds_to) * self.rounds_to
            if start + given > self.sm_count or (self.fails and not dry_run):
                raise CUDAError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
            groups.append(SMResource(self.numbers[start : start + given]))
            start += given
        return groups, SMResource(self.numbers[start:])


@dataclass
class Stream:
    """A stream of a green context."""

    handle: int
    resources: list[SMResource]


_handles = count(1)


@dataclass
class Context:
    """A green context."""

    resources: list[SMResource]

    def create_stream(self, options: object = None) -> Stream:
        return Stream(next(_handles), self.resources)


@dataclass
class FakeCudaCore:
    """The module. ``made`` holds every context that was created."""

    sm: SMResource
    name: str = "NVIDIA H200"
    made: list[Context] = field(default_factory=list)
    SMResourceOptions: type = SMResourceOptions
    ContextOptions: type = ContextOptions

    def Device(self, index: int) -> FakeCudaCore:  # noqa: N802 - the real name
        return self

    @property
    def resources(self) -> FakeCudaCore:
        return self

    def set_current(self) -> None:
        """The device becomes the thread's."""

    def create_context(self, options: ContextOptions) -> Context:
        context = Context(list(options.resources))
        self.made.append(context)
        return context
