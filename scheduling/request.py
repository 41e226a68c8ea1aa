"""What the policies know about a request.

All times are integer microseconds on one monotonic clock, the clock of the host that calls the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReleasePolicy(StrEnum):
    """When a generated token goes to the client.

    ``SLO`` is the paper's token queue (HALO section 5.3): the first token at the TTFT target, then one every TBT.
    ``BOUNDED`` sends the first token at once and holds later ones towards their TBT, but never longer than
    ``hold_max_us``. ``OFF`` sends tokens as they are generated.
    """

    SLO = "slo"
    BOUNDED = "bounded"
    OFF = "off"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request as the scheduler sees it. The host owns it and updates it in place; policies only read it.

    ``prompt_tokens`` counts what must be computed before the next token can be generated: the prompt, or, after a
    preemption, the prompt and everything generated so far. ``computed_tokens`` counts what is in the KV cache.
    ``last_release_us`` is the scheduled release time of the newest generated token; it has no meaning while
    ``generated_tokens`` is 0. ``adapter`` is the engine's LoRA id, 0 for the base model.
    """

    request_id: str
    service: str
    arrival_us: int
    ttft_us: int
    tbt_us: int
    prompt_tokens: int
    computed_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int = 1
    last_release_us: int = 0
    adapter: int = 0
    kv_blocks: int = 0
    release: ReleasePolicy = ReleasePolicy.BOUNDED
    streaming: bool = True

    @property
    def deadline_us(self) -> int:
        """Latest time at which the next token may reach the client (HALO section 5.3, Eq. 2-3 in closed form).

        A request that does not stream has one deadline, its last token's: arrival + TTFT + (max_tokens - 1) * TBT. Its
        next token is due when the tokens after it, at one per TBT, just make that deadline.
        """
        if not self.streaming:
            return self.arrival_us + self.ttft_us + self.generated_tokens * self.tbt_us
        if self.generated_tokens == 0:
            return self.arrival_us + self.ttft_us
        return self.last_release_us + self.tbt_us

    def slack_us(self, now_us: int) -> int:
        """Time left until :attr:`deadline_us`; negative once it has passed."""
        return self.deadline_us - now_us

    @property
    def prefill_left(self) -> int:
        """Tokens still to be computed before the next token can be generated beyond a decode step; 0 in decode."""
        left = self.prompt_tokens - self.computed_tokens
        return left if left > 0 else 0

    @property
    def edf_key(self) -> tuple[int, int, str]:
        """Earliest deadline first; ties go to the earlier arrival, then to the id, so that order is total."""
        return (self.deadline_us, self.arrival_us, self.request_id)
