"""The layer pairs of a transformer and the thread blocks their kernels launch.

Shapes are those of one tensor-parallel rank. Block counts follow the kernels vLLM 0.32 launches: cuBLAS tiles for the
base layer, ``vllm/lora/ops/triton_ops`` (default configuration) for the LoRA layer.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2  # bfloat16

BLOCK_LATENCY_US = 2.0
"""A block loads, computes and stores one after the other, however little of it there is."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A linear layer with ``size_in`` inputs whose outputs are ``slices`` side by side (Q, K and V, for example)."""

    name: str
    size_in: int
    slices: tuple[int, ...]

    @property
    def size_out(self) -> int:
        """All outputs together."""
        return sum(self.slices)


def llama_groups(
    *, hidden: int, heads: int, kv_heads: int, head_size: int, intermediate: int, tensor_parallel: int = 1
) -> tuple[LayerGroup, ...]:
    """QKV, O, Gate/Up and Down of a Llama-like model, as one of ``tensor_parallel`` ranks holds them.

    Raises ValueError when the sizes cannot be divided.
    """
    if heads % tensor_parallel or intermediate % tensor_parallel:
        raise ValueError(f"{heads} heads and {intermediate} columns cannot be divided by {tensor_parallel}")
    q_size = heads // tensor_parallel * head_size
    kv_size = max(kv_heads // tensor_parallel, 1) * head_size
    columns = intermediate // tensor_parallel
    return (
        LayerGroup("qkv", hidden, (q_size, kv_size, kv_size)),
        LayerGroup("o", q_size, (hidden,)),
        LayerGroup("gate_up", hidden, (columns, columns)),
        LayerGroup("down", columns, (hidden,)),
    )


LLAMA3_8B = llama_groups(hidden=4096, heads=32, kv_heads=8, head_size=128, intermediate=14336)


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A base layer and its LoRA product for ``tokens`` rows that use ``adapters`` adapters of ``rank`` evenly."""

    group: LayerGroup
    tokens: int
    rank: int
    adapters: int

    @property
    def output_bytes(self) -> int:
        """Size of the pair's output."""
        return self.tokens * self.group.size_out * BYTES

    def __str__(self) -> str:
        return f"{self.group.name}, {self.tokens} tokens, rank {self.rank}, {self.adapters} adapters"


@dataclass(frozen=True, slots=True)
class Kernel:
    """``blocks`` equal thread blocks, ``per_sm`` of which share an SM.

    A block computes ``flops``, moves ``bytes``, and takes ``latency_us`` at least: its loads wait for each other.
    """

    blocks: int
    per_sm: int
    flops: float
    bytes: float
    latency_us: float


def base_kernels(pair: LayerPair) -> tuple[Kernel, ...]:
    """The kernels among which a library picks one for the base layer's matrix product.

    It picks for the whole GPU and does not know of the partition, which is where waves come from. Few rows leave few
    tiles; then the inner dimension may be split.
    """
    rows = min(max(16, 1 << (pair.tokens - 1).bit_length()), 128)
    return tuple(
        _base_kernel(pair.group, pair.tokens, rows, columns, split)
        for columns in (64, 128, 256)
        for split in (1, 2, 4, 8)
        if split == 1 or pair.group.size_in // split >= 512
    )


def _base_kernel(group: LayerGroup, tokens: int, rows: int, columns: int, split: int) -> Kernel:
    inner = group.size_in / split
    # Rows are read by every column tile, mostly out of the second-level cache; split sums are written as float32.
    traffic = BYTES * inner * (columns + rows / 4) + rows * columns * (BYTES if split == 1 else 4)
    blocks = -(-tokens // rows) * -(-group.size_out // columns) * split
    return Kernel(blocks, 2 if rows * columns <= 64 * 128 else 1, 2 * rows * columns * inner, traffic, BLOCK_LATENCY_US)


def lora_kernels(pair: LayerPair) -> tuple[Kernel, ...]:
    """Shrink and expand of the LoRA product, one after the other.

    Grids: ``lora_shrink_op.py`` launches split_k x row tiles x rank tiles x slices x adapters, ``lora_expand_op.py``
    row tiles x column tiles x slices x adapters. Row tiles beyond an adapter's rows return at once and do not count.
    """
    group, tokens, rank = pair.group, pair.tokens, pair.rank
    used = min(pair.adapters, tokens)
    rows = -(-tokens // used)
    split = 64 if tokens < 128 else 8
    columns = min(rank, 16)
    shrink = -(-rows // 32) * -(-rank // 16) * split * len(group.slices) * used
    inner = group.size_in / split
    tile = 64 if len(group.slices) > 1 else 128
    expand = -(-rows // 64) * sum(-(-size // tile) for size in group.slices) * used
    return (
        Kernel(
            shrink,
            8,
            2 * 32 * 16 * inner,
            BYTES * inner * (columns + min(rows, 32) / 4) + min(rows, 32) * columns,
            BLOCK_LATENCY_US,
        ),
        Kernel(
            expand,
            4,
            2 * 64 * tile * rank,
            BYTES * (tile * rank + min(rows, 64) * (2 * tile + rank / 4)),
            BLOCK_LATENCY_US,
        ),
    )
