"""vLLM's CPU matrix products, as the LoRA products use them: ``gemm(out, x)`` writes ``x @ weight.T`` into ``out``.

Two kernels of vLLM's own library, no compiler needed: oneDNN with a weight packed once (what its base layers use),
and the small ``weight_packed_linear``, which writes into a strided ``out``, needs no code generation for a new row
count and is faster for few rows. All accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import _custom_ops as vllm_ops

Gemm = Callable[[torch.Tensor, torch.Tensor], None]

# oneDNN keeps this many row counts per packed weight ready; vLLM uses the same number for the base layers.
ROW_COUNTS_CACHED = 32


def can_be_strided(weight: torch.Tensor) -> bool:
    """Whether `strided_gemm` takes ``weight`` (out, in) on this CPU.

    The kernel aborts the process where an instruction is missing, so it is used only where that is known to be there.
    """
    rows, columns = weight.shape
    return (
        weight.dtype == torch.bfloat16
        and rows % 16 == 0
        and columns % 32 == 0
        and torch.cpu._is_avx512_bf16_supported()
        and hasattr(torch.ops._C, "weight_packed_linear")
    )


def strided_gemm(weight: torch.Tensor) -> Gemm:
    """The product with ``weight`` (out, in), if `can_be_strided`; ``out`` and ``x`` may be column slices."""
    packed = torch.ops._C.convert_weight_packed(weight.contiguous())
    kernel = torch.ops._C.weight_packed_linear.default._op

    def gemm(out: torch.Tensor, x: torch.Tensor) -> None:
        kernel(out, x, packed, None, True)

    return gemm


def contiguous_gemm(weight: torch.Tensor) -> Gemm:
    """The product with ``weight`` (out, in); ``out`` must be contiguous, ``x`` may be a column slice."""
    handler = None
    if vllm_ops._supports_onednn:
        try:
            handler = vllm_ops.create_onednn_mm(weight.t(), ROW_COUNTS_CACHED)
        except RuntimeError:  # float16 on a CPU without its instructions; vLLM's own layers fall back the same way
            handler = None
    if handler is None:
        columns = weight.t().contiguous()

        def plain(out: torch.Tensor, x: torch.Tensor) -> None:
            torch.mm(x, columns, out=out)

        return plain
    # The default argument keeps the handler, which owns the packed copy, as long as the function lives.
    kernel, handler_tensor = torch.ops._C.onednn_mm.default._op, handler.handler_tensor

    def gemm(out: torch.Tensor, x: torch.Tensor, _owner: object = handler) -> None:
        kernel(out, x, None, handler_tensor)

    return gemm
