"""Two halves of a layer pair run at once on a CPU: `vllm_plugin.lora_overlap.SideBySide` with threads for streams."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from partition.configs import Split


class ThreadedSideBySide:
    """Neither half ends before both have begun, so that results cannot depend on their order."""

    def __init__(self, *, failure: Exception | None = None, capturing: bool = False) -> None:
        self.failure, self.capturing = failure, capturing
        self.prepared: frozenset[Split] = frozenset()
        self.ran: list[Split] = []
        self._threads = ThreadPoolExecutor(2)

    def may_prepare(self) -> bool:
        return not self.capturing

    def prepare(self, splits: frozenset[Split]) -> None:
        if self.failure is not None:
            raise self.failure
        self.prepared = splits

    def run(self, split, base, lora):
        assert split in self.prepared
        self.ran.append(split)
        begun = threading.Barrier(2, timeout=10)

        def half(part) -> torch.Tensor:
            with torch.no_grad():
                begun.wait()
                return part()

        futures = [self._threads.submit(half, part) for part in (base, lora)]
        return futures[0].result(), futures[1].result()
