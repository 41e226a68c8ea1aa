"""KV blocks of one replica: how many are in use, and which prompt beginnings are still there for others.

Without prefix caching this is a counter. With it, full blocks of a shared prompt beginning stay after their last user
has left, until memory is wanted, least recently used first and from the end of each beginning: what vLLM's
``KVCacheManager`` does for requests that share a system prompt or a conversation. As there, a request never takes its
whole prompt from the cache, since its last token must be computed to have something to sample from. Not modelled: that
a preempted request may find its own blocks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Chain:
    """The cached blocks of one shared beginning: ``cached`` of them are there, those below ``held`` are in use."""

    cached: int = 0
    uses: dict[int, int] = field(default_factory=dict)
    used_at: int = 0

    @property
    def held(self) -> int:
        return max(self.uses, default=0)


class KvCache:
    """``blocks`` KV blocks of ``block_tokens`` tokens. ``used`` are those that requests hold."""

    def __init__(self, blocks: int, block_tokens: int, *, prefix_caching: bool = False) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.used = 0
        self.peak = 0
        self.hit_tokens = 0
        self._chains: dict[str, _Chain] = {}
        self._idle = 0
        self._clock = 0

    @property
    def free(self) -> int:
        """Blocks that can be had, cached ones that nobody uses included."""
        return self.blocks - self.used

    def take(self, blocks: int) -> None:
        """Hold ``blocks`` more; the caller has looked at :attr:`free`."""
        self.used += blocks
        self.peak = max(self.peak, self.used)
        if self.used + self._idle > self.blocks:
            self._evict(self.used + self._idle - self.blocks)

    def give_back(self, blocks: int) -> None:
        """Release ``blocks`` that nobody shares."""
        self.used -= blocks

    def reuse(self, key: str, prompt_tokens: int, prefix_tokens: int) -> int:
        """Hold the cached blocks of the beginning ``key`` and return how many; 0 when there are none."""
        chain = self._chains.get(key) if self.prefix_caching and key else None
        if chain is None:
            return 0
        found = min(chain.cached, min(prefix_tokens, prompt_tokens - 1) // self.block_tokens)
        if found <= 0:
            return 0
        self._hold(chain, found)
        self.hit_tokens += found * self.block_tokens
        return found

    def publish(self, key: str, shared: int, computed_tokens: int, prefix_tokens: int) -> int:
        """Offer to others what a request has computed of its beginning, ``shared`` blocks of which it shares already.

        Returns how many it shares now. Blocks that another request published first stay private.
        """
        if not self.prefix_caching or not key:
            return shared
        full = min(computed_tokens, prefix_tokens) // self.block_tokens
        if full <= shared:
            return shared
        chain = self._chains.setdefault(key, _Chain())
        if chain.cached != shared:
            return shared
        chain.cached = full
        self._release(chain, shared)
        self._count(chain, full)
        return full

    def drop(self, key: str, shared: int, blocks: int) -> None:
        """Release all ``blocks`` of a request, of which the first ``shared`` are shared."""
        self.used -= blocks - shared
        if shared:
            chain = self._chains[key]
            before = chain.held
            self._release(chain, shared)
            idle = before - chain.held
            self.used -= idle
            self._idle += idle

    def _hold(self, chain: _Chain, blocks: int) -> None:
        fresh = max(0, blocks - chain.held)
        self.used += fresh
        self._idle -= fresh
        self.peak = max(self.peak, self.used)
        self._count(chain, blocks)

    def _count(self, chain: _Chain, blocks: int) -> None:
        chain.uses[blocks] = chain.uses.get(blocks, 0) + 1
        self._clock += 1
        chain.used_at = self._clock

    @staticmethod
    def _release(chain: _Chain, blocks: int) -> None:
        if not blocks:
            return
        left = chain.uses[blocks] - 1
        if left:
            chain.uses[blocks] = left
        else:
            del chain.uses[blocks]

    def _evict(self, blocks: int) -> None:
        for chain in sorted(self._chains.values(), key=lambda c: c.used_at):
            gone = min(blocks, chain.cached - chain.held)
            chain.cached -= gone
            self._idle -= gone
            blocks -= gone
            if not blocks:
                break
        self._chains = {key: chain for key, chain in self._chains.items() if chain.cached or chain.uses}
