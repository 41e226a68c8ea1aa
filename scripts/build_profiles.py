"""Build simulator/data/profiles/*.json from measured kernel tables.

    python -m scripts.build_profiles --tables DIR

DIR holds the CSV files of aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0; parquet tables of ``systems/data`` converted
to CSV, bfloat16 rows only) and MLP timings of microsoft/vidur (MIT) are folded into ELEMENTWISE below. The tables are
not shipped; the profiles made from them are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.kernel_tables import (
    AffineFit,
    Attention,
    Grid,
    Shape,
    at_heads,
    fit_decode_attention,
    fit_prefill_attention,
    gemm_ms,
    interpolate,
    read_allreduce,
    read_attention,
    read_gemm,
)
from simulator.curve import Curve
from simulator.hardware_profile import FORMAT, SHIPPED, dump_costs
from simulator.step_shape import StepShape
from simulator.step_times import StepCosts, StepTimes

LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 128_256)
QWEN_7B = Shape(28, 3584, 28, 4, 18944, 152_064)
YI_34B = Shape(60, 7168, 56, 8, 20480, 64_000, tp=4)
QWEN_32B = Shape(64, 5120, 40, 8, 27648, 152_064, tp=4)

ROWS = (1, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))

# Norms, rotary embedding, activation and residual of Llama3-8B on an A100, milliseconds for 32 layers (microsoft/vidur,
# data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv, MIT).
ELEMENTWISE_MS = ((1, 0.93), (64, 0.96), (128, 1.22), (256, 1.89), (384, 2.43), (512, 3.04), (8192, 45.0))

# HALO section 1: decode of Llama3-8B with LoRAs on an A100, short context.
ANCHORS_MS = {384: 47.0, 512: 57.0}
ANCHOR_CONTEXT = 128
LORA_LAUNCH_MS = 3.0
LORA_PREFILL_SHARE = 0.10
HOST_MS = 1.0
EAGER_MS = 1.0
OVERLAP_SHARE = 0.311


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, the tables that were measured on it or on its stand-in, and how the stand-in differs.

    ``l2_mb`` is the L2 cache of the GPU that was measured. ``memory_scale`` multiplies times bound by memory bandwidth
    (attention of decodes, small products), ``compute_scale``
    the others.
    """

    name: str
    tables: str
    memory_gb: float
    l2_mb: int
    memory_scale: float = 1.0
    compute_scale: float = 1.0
    note: str = ""


A100 = Device("A100-SXM4-80GB", "a100_sxm_vllm_0.14.0", 85.0, 40)
A100_40 = Device(
    "A100-SXM4-40GB",
    "a100_sxm_vllm_0.14.0",
    42.4,
    40,
    memory_scale=2039 / 1555,
    note="A100-SXM4-80GB times the ratio of memory bandwidths where memory binds",
)
ADA = Device(
    "RTX 6000 Ada",
    "l40s_sglang_0.5.14",
    51.5,
    96,
    memory_scale=864 / 960,
    note="L40S tables (same AD102 chip) times the ratio of memory bandwidths where memory binds",
)
RTX_5090 = Device(
    "RTX 5090",
    "rtx_pro_6000_server_sglang_0.5.14",
    34.2,
    128,
    compute_scale=188 / 170,
    note="RTX PRO 6000 Server tables (same GB202 chip, same bandwidth) times the ratio of SMs where arithmetic binds",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A profile to build. ``batch`` is the paper's B; ``published`` are decode times to compare with, not to fit to."""

    name: str
    model: str
    shape: Shape
    device: Device
    batch: int
    published: tuple[tuple[str, int, int, float], ...] = ()


TARGETS = (
    Target(
        "llama3-8b-a100-80g",
        "Llama3-8B",
        LLAMA_8B,
        A100,
        384,
        (
            ("HALO 1 (anchor)", 384, ANCHOR_CONTEXT, 47.0),
            ("HALO 1 (anchor)", 512, ANCHOR_CONTEXT, 57.0),
            ("HALO 6.2: 45 to 46 ms at 1K", 384, 1024, 45.5),
        ),
    ),
    Target(
        "qwen2.5-7b-a100-80g", "Qwen2.5-7B", QWEN_7B, A100, 384, (("HALO 6.2: 45 to 46 ms at 1K", 384, 1024, 45.5),)
    ),
    Target("yi-34b-4xa100-80g", "Yi1.5-34B", YI_34B, A100, 256, (("HALO 6.2: 70 to 73 ms at 1K", 256, 1024, 71.5),)),
    Target(
        "qwen2.5-32b-4xa100-80g",
        "Qwen2.5-32B",
        QWEN_32B,
        A100,
        256,
        (("HALO 6.2: 70 to 73 ms at 1K", 256, 1024, 71.5),),
    ),
    Target("llama3-8b-ada6000", "Llama3-8B", LLAMA_8B, ADA, 256, (("HALO 6.8: 49 ms", 256, 256, 49.0),)),
    Target("llama3-8b-rtx5090", "Llama3-8B", LLAMA_8B, RTX_5090, 256),
    Target("llama3-8b-a100-40g", "Llama3-8B", LLAMA_8B, A100_40, 256),
)


@dataclass(frozen=True, slots=True)
class Tables:
    """The kernel tables of one device."""

    gemm: Grid
    decode: Attention
    prefill: Attention

    @classmethod
    def read(cls, folder: Path, prefix: str) -> Tables:
        """Read the three files whose names begin with ``prefix``."""
        return cls(
            read_gemm(folder / f"{prefix}_gemm_bf16.csv"),
            read_attention(folder / f"{prefix}_generation_attention_bf16.csv", decode=True),
            read_attention(folder / f"{prefix}_context_attention_bf16.csv", decode=False),
        )


def base_costs(shape: Shape, device: Device, tables: Tables, folder: Path) -> tuple[StepCosts, AffineFit, AffineFit]:
    """The costs of a model without LoRA, and the fits of decode and prefill attention."""
    heads, kv_heads = shape.heads // shape.tp, max(1, shape.kv_heads // shape.tp)
    layer_kv = shape.kv_bytes // shape.layers
    decode = fit_decode_attention(at_heads(tables.decode, heads, kv_heads), int(1.5e6 * device.l2_mb / layer_kv))
    prefill = fit_prefill_attention(at_heads(tables.prefill, heads, kv_heads))
    layer_us = 1000.0 * shape.layers
    fixed_us = decode.prices[0] * layer_us * device.memory_scale
    dense = [(rows, _dense_ms(shape, device, tables, rows) * 1000 + fixed_us) for rows in ROWS]
    head = [
        (n, gemm_ms(tables.gemm, n, shape.vocab // shape.tp, shape.hidden) * _scale(device, n) * 1000)
        for n in ROWS[:11]
    ]
    communication = None
    if shape.tp > 1:
        points = read_allreduce(folder / "a100_sxm_sglang_0.5.10_custom_allreduce.csv", shape.tp)
        communication = Curve([(n, 2 * layer_us * interpolate(points, n * shape.hidden)) for n in ROWS])
    return (
        StepCosts(
            dense=Curve(_rising(dense)),
            head=Curve(_rising(head)),
            communication=communication,
            per_decode_us=decode.prices[1] * layer_us * device.memory_scale,
            per_context_token_us=decode.prices[2] * layer_us * device.memory_scale,
            per_prefill_token_us=prefill.prices[1] * layer_us * device.compute_scale,
            per_pair_us=prefill.prices[2] * layer_us * device.compute_scale,
            per_chunk_us=prefill.prices[0] * layer_us,
            host_us=HOST_MS * 1000,
            graph_sizes=GRAPH_SIZES,
            eager_us=EAGER_MS * 1000,
            noise_pct=2.0,
        ),
        decode,
        prefill,
    )


def _dense_ms(shape: Shape, device: Device, tables: Tables, rows: int) -> float:
    products = sum(gemm_ms(tables.gemm, rows, n, k) for n, k in shape.matmuls.values()) * shape.layers
    elementwise = interpolate(ELEMENTWISE_MS, rows) * shape.layers * shape.hidden / (32 * 4096)
    return products * _scale(device, rows) + elementwise * device.memory_scale


def _scale(device: Device, rows: int) -> float:
    """Small products are bound by memory, large ones by arithmetic; between 64 and 256 rows it changes."""
    share = min(1.0, max(0.0, (rows - 64) / 192))
    return device.memory_scale * (1 - share) + device.compute_scale * share


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Measured times with dips of a few percent taken out: more rows never take less time."""
    best, result = 0.0, []
    for count, value in points:
        best = max(best, value)
        result.append((count, best))
    return result


def decode_ms(costs: StepCosts, batch: int, context: int) -> float:
    """A decode step without noise, in milliseconds."""
    return StepTimes(costs).exact_us(StepShape(batch, batch * context, (), batch))[0] / 1000


def anchor_lora(base: StepCosts) -> Curve:
    """LoRA of Llama3-8B on an A100, all groups: what is left of the paper's decode times after the base."""
    points = [(1, LORA_LAUNCH_MS * 1000)]
    for rows, anchor_ms in ANCHORS_MS.items():
        points.append((rows, max(points[-1][1], (anchor_ms - decode_ms(base, rows, ANCHOR_CONTEXT)) * 1000)))
    growth = base.dense(8192) - base.dense(512)
    points.append((8192, points[-1][1] + LORA_PREFILL_SHARE * growth))
    return Curve(points)


def lora_groups(shape: Shape, total: Curve, slowdown: float) -> dict[str, Curve]:
    """Share ``total`` out to layer groups by what their adapters read and write, scaled to another model and device."""
    reference = sum(n + k for n, k in LLAMA_8B.matmuls.values()) * LLAMA_8B.layers
    launch = total.points[0][1]
    groups = {}
    for group, (n, k) in shape.matmuls.items():
        size = (n + k) * shape.layers / reference
        fixed = launch * shape.layers / LLAMA_8B.layers / len(shape.matmuls)
        groups[group] = Curve([(rows, fixed + (us - launch) * size * slowdown) for rows, us in total.points])
    return groups


def build(target: Target, folder: Path, lora: Curve, reference: StepCosts) -> dict[str, Any]:
    """The plain values of a profile file."""
    shape, device = target.shape, target.device
    tables = Tables.read(folder, device.tables)
    base, decode, prefill = base_costs(shape, device, tables, folder)
    llama_here = base if shape is LLAMA_8B else base_costs(LLAMA_8B, device, tables, folder)[0]
    slowdown = llama_here.dense(384) / reference.dense(384)
    costs = replace(
        base,
        lora=lora_groups(shape, lora, slowdown),
        overlap_share=OVERLAP_SHARE,
        overlap_rows_max=512,
        per_finetune_token_us=0.0,
    )
    free = 0.9 * device.memory_gb * 1e9 - shape.weight_bytes - 3e9
    return {
        "format": FORMAT,
        "name": target.name,
        "model": target.model,
        "hardware": f"{shape.tp} x {device.name}" if shape.tp > 1 else device.name,
        "gpus": shape.tp,
        "parameters_b": round(shape.weight_bytes * shape.tp / 2e9, 1),
        "batch": target.batch,
        "engine": {
            "step_tokens": 8192,
            "running": 1024,
            "adapters": 8,
            "kv_blocks": int(free / shape.kv_bytes / 16),
            "kv_block_tokens": 16,
        },
        "costs": dump_costs(costs),
        "sources": _sources(device, shape),
        "checks": [_fit("decode attention", decode), _fit("prefill attention", prefill)]
        + [_check(costs, *point) for point in target.published],
    }


def _fit(what: str, fit: AffineFit) -> dict[str, Any]:
    return {
        "what": f"affine fit of {what} to the kernel table",
        "error_median_pct": round(100 * fit.error_median, 1),
        "error_p95_pct": round(100 * fit.error_p95, 1),
        "error_signed_mean_pct": round(100 * fit.error_mean, 1),
    }


def _check(costs: StepCosts, what: str, batch: int, context: int, published_ms: float) -> dict[str, Any]:
    ours = decode_ms(costs, batch, context)
    return {
        "what": what,
        "batch": batch,
        "context": context,
        "published_ms": published_ms,
        "ours_ms": round(ours, 1),
        "error_pct": round(100 * (ours / published_ms - 1), 1),
    }


def _sources(device: Device, shape: Shape) -> list[dict[str, str]]:
    tables = f"PyPI aiconfigurator-core 0.12.0, {device.tables} (NVIDIA)"
    scaled = (
        {"kind": "derived", "source": f"{tables}; {device.note}"}
        if device.note
        else {"kind": "measured", "source": tables}
    )
    sources = [
        {"what": "products and attention", **scaled, "licence": "Apache-2.0"},
        {
            "what": "norms, rotary embedding, activation, residual",
            "kind": "derived",
            "source": "microsoft/vidur 7d47513, a100 Meta-Llama-3-8B mlp.csv, scaled by layers and hidden size",
            "licence": "MIT",
        },
        {
            "what": "LoRA time",
            "kind": "derived",
            "source": "HALO (arXiv:2610.04956) section 1: decode of Llama3-8B on an A100 takes 47 ms at batch 384 and "
            "57 ms at 512, less the kernel tables at context 128; shared out to layer groups and scaled to other "
            "models by adapter sizes, to other GPUs by their products",
            "licence": "facts from a paper",
        },
        {
            "what": "LoRA launch cost 3 ms for 32 layers, 10 % of the products beyond 512 rows",
            "kind": "assumed",
            "source": "",
            "licence": "",
        },
        {
            "what": "base-LoRA overlap hides 31.1 % of LoRA time in steps of at most 512 rows",
            "kind": "assumed",
            "source": "HALO section 6.6 gives 31.1 % on average for decode steps; that mixed steps of this size gain "
            "too is assumed (its ablation, section 6.7, needs it)",
            "licence": "facts from a paper",
        },
        {
            "what": "host time between steps 1 ms, eager step 1 ms more than a graph, 2 % noise",
            "kind": "assumed",
            "source": "",
            "licence": "",
        },
        {
            "what": "KV blocks: 90 % of memory less weights and 3 GB",
            "kind": "derived",
            "source": "arithmetic from model and device sizes",
            "licence": "",
        },
    ]
    if shape.tp > 1:
        source = "PyPI aiconfigurator-core 0.12.0, a100_sxm custom all-reduce in a graph (NVIDIA)"
        sources.append({"what": "all-reduce", "kind": "measured", "source": source, "licence": "Apache-2.0"})
    return sources


def main() -> None:
    """Write every profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    folder = parser.parse_args().tables
    reference, _, _ = base_costs(LLAMA_8B, A100, Tables.read(folder, A100.tables), folder)
    lora = anchor_lora(reference)
    SHIPPED.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        data = build(target, folder, lora, reference)
        (SHIPPED / f"{target.name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(target.name, data["engine"]["kv_blocks"], *data["checks"], sep="\n   ")


if __name__ == "__main__":
    main()
