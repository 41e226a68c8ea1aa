"""Streams that may use only some of a GPU's SMs: CUDA green contexts through cuda-python.

One ``SMResource.split`` call (driver 13.1 or newer for unequal groups) gives disjoint groups; two calls could overlap,
because each of them splits the whole device. torch's own ``torch.cuda.green_contexts`` makes one group per call and is
therefore not used for pairs.

Nothing here has run on a GPU yet. cuda-python is imported when a `GreenDevice` is made without one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from partition.configs import MeasurementError, SmGeometry, Split

FINE_GRANULE = 2


def _torch_stream(handle: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.cuda.ExternalStream(handle)


class GreenDevice:
    """A GPU that can be cut. ``core`` is the module ``cuda.core``; ``wrap`` makes a torch stream of a stream's handle.

    Contexts are kept: a stream is made once for each way to cut, and lives as long as this object.
    """

    def __init__(self, index: int = 0, *, core: Any | None = None, wrap: Callable[[int], Any] = _torch_stream) -> None:
        self._core: Any = core if core is not None else importlib.import_module("cuda.core")
        self._wrap = wrap
        self._device = self._core.Device(index)
        self._device.set_current()
        self._sm = self._device.resources.sm
        self._groups: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._owned: list[Any] = []
        self.granularity = FINE_GRANULE if self._cuts_finely() else max(int(self._sm.coscheduled_alignment), 1)

    @property
    def name(self) -> str:
        """The GPU's name as the driver gives it."""
        return str(self._device.name)

    @property
    def geometry(self) -> SmGeometry:
        """SMs that are there (one that is switched off is not), and how they can be cut."""
        fine = self.granularity == FINE_GRANULE
        smallest = FINE_GRANULE if fine and self._cuts((FINE_GRANULE, FINE_GRANULE)) else self._sm.min_partition_size
        return SmGeometry(int(self._sm.sm_count), self.granularity, int(smallest))

    def streams(self, split: Split) -> tuple[Any, Any]:
        """A stream for the base layer and one for LoRA on disjoint SMs. Raises `MeasurementError`."""
        base, lora = self._streams((split.base_sms, split.lora_sms))
        return base, lora

    def stream(self, sms: int) -> Any:
        """A stream on ``sms`` SMs. Raises `MeasurementError`."""
        (stream,) = self._streams((sms,))
        return stream

    def _streams(self, counts: tuple[int, ...]) -> tuple[Any, ...]:
        if counts not in self._groups:
            # The driver's errors have no common class of their own; whatever it is, this cut cannot be used.
            try:
                self._groups[counts] = tuple(self._make_streams(counts))
            except MeasurementError:
                raise
            except Exception as error:
                raise MeasurementError(
                    f"cutting {self.name} into {counts} SMs: {type(error).__name__}: {error}"
                ) from error
        return self._groups[counts]

    def _make_streams(self, counts: Sequence[int]) -> list[Any]:
        groups, _ = self._sm.split(self._options(counts))
        given = [int(group.sm_count) for group in groups]
        if given != list(counts):
            # Rounded up by the driver: what was measured would not be what the table says.
            raise MeasurementError(f"asked {self.name} for {list(counts)} SMs, the driver gave {given}")
        streams = []
        for group in groups:
            context = self._device.create_context(self._core.ContextOptions(resources=[group]))
            stream = context.create_stream()
            self._owned += [context, stream]
            streams.append(self._wrap(int(stream.handle)))
        return streams

    def _options(self, counts: Sequence[int]) -> Any:
        return self._core.SMResourceOptions(
            count=list(counts), coscheduled_sm_count=[self.granularity] * len(counts), backfill=[True] * len(counts)
        )

    def _cuts_finely(self) -> bool:
        self.granularity = FINE_GRANULE
        wanted = max(int(self._sm.min_partition_size), FINE_GRANULE)
        return self._cuts((wanted, wanted + FINE_GRANULE))

    def _cuts(self, counts: tuple[int, ...]) -> bool:
        """Whether the driver would cut exactly so."""
        try:
            groups, _ = self._sm.split(self._options(counts), dry_run=True)
        except Exception:  # an old driver, or one that does not split so: any error means no
            return False
        return [int(group.sm_count) for group in groups] == list(counts)
