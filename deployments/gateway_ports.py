"""What a gateway needs of its surroundings besides engines and admission."""

from __future__ import annotations

from typing import Protocol

from deployments.protocol import Outcome


class KeyHolder(Protocol):
    """Who a request's API key belongs to. ``rate_per_s`` is how many requests a second it may send, None for any."""

    @property
    def name(self) -> str:
        """The key's name."""
        ...

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second, over all gateways."""
        ...

    def may_use(self, service: str) -> bool:
        """Whether this key may use the service."""
        ...


class Keys(Protocol):
    """The API keys of a server. Implemented by ``auth.KeyTable`` and ``tests/fakes``."""

    def authenticate(self, header: str | None) -> KeyHolder | None:
        """The holder of the key in an Authorization header; None when it is missing, malformed or unknown."""
        ...


class GatewayMetrics(Protocol):
    """What a gateway reports. Implemented by ``RayMetrics`` and ``tests/fakes``."""

    def refused(self, service: str) -> None:
        """A request was invalid."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """A valid request ended."""
        ...

    def first_token(self, service: str, ttft_us: int) -> None:
        """The first token of a streamed response was released."""
        ...

    def gap(self, service: str, gap_us: int, count: int) -> None:
        """``count`` gaps of this length between released tokens."""
        ...

    def queued(self, service: str, queued_us: int) -> None:
        """A request was granted a replica after this time in the queue."""
        ...

    def shed(self, service: str, reason: str) -> None:
        """A request was turned away."""
        ...

    def held(self, deliveries: int) -> None:
        """How many deliveries the pacer holds now."""
        ...
