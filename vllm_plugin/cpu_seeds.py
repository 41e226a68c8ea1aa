"""Seeded requests on CPUs: keep them from ending the engine.

When a prompt is computed in chunks, vLLM samples after every chunk and discards the result; for a seeded request it
then turns the random generator back (``GPUModelRunner._bookkeeping_sync``: ``gen.set_offset(gen.get_offset() - 4)``).
CPU generators have no offset: the call raises, the worker fails and the engine ends. One request with a ``seed`` and a
prompt longer than a chunk is enough. Here the generator's state is saved before such a sample and restored after it,
which gives the tokens a seeded request gets when its prompt fits in one chunk.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from vllm_plugin.compat import UpstreamChangedError

_MARK = "_halo_saved_generators"


def install_cpu_seeds() -> str:
    """Replace the two methods of vLLM's CPU model runner; calling it again changes nothing.

    Raises `UpstreamChangedError` when vLLM no longer has what is replaced.
    """
    if not current_platform.is_cpu():
        return "not needed: no CPU engine"
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415

    if hasattr(CPUModelRunner, _MARK):
        return "active"
    for name in ("_sample", "_bookkeeping_sync"):
        if not callable(getattr(CPUModelRunner, name, None)):
            raise UpstreamChangedError(f"CPUModelRunner.{name} is gone")
    if "set_offset" not in inspect.getsource(CPUModelRunner._bookkeeping_sync):
        return "not needed: vLLM no longer turns generators back by offset"
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @functools.wraps(sample)
    def save_then_sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _MARK, _save_discarded(self))
        return sample(self, *args, **kwargs)

    @functools.wraps(bookkeeping)
    def book_then_restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved = getattr(self, _MARK)
        generators = self.input_batch.generators
        hidden = {index: generators.pop(index) for index in saved}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(hidden)
            for index, generator in hidden.items():
                generator.set_state(saved[index])

    CPUModelRunner._sample = save_then_sample
    CPUModelRunner._bookkeeping_sync = book_then_restore
    setattr(CPUModelRunner, _MARK, {})
    return "active"


def _save_discarded(runner: Any) -> dict[int, Any]:
    """The states of the generators whose sample of this step will be discarded, by row."""
    generators = runner.input_batch.generators
    if not generators:
        return {}
    discarded = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    return {int(row): generators[int(row)].get_state() for row in discarded if int(row) in generators}
