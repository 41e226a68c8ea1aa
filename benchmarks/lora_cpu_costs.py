"""Fit the cost model that chooses which rows share a LoRA product on the CPU (`partition.cpu_paths.CpuLoraCosts`).

    python -m benchmarks.lora_cpu_costs [--json] [--table FILE]

Times one product of each layer group of the default model (QKV, O, gate and up, down) for several row counts, ranks and
row layouts, with more copies of the weights than the caches hold, and fits the coefficients by non-negative least
squares on relative errors. The defaults in the code are its output on the machine in docs/measurements/lora-cpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lora_cpu import hardware
from deployments.durable_file import write_durably
from deployments.partition_job import vllm_version
from partition.cpu_paths import CpuLoraCosts, RowGroup
from partition.table import PartitionTable, to_text
from vllm_plugin.cpu_costs import cpu_key
from vllm_plugin.cpu_lora_ops import AdapterStack, StepGroup

SHAPES = {"qkv": (576, (576, 192, 192)), "o": (576, (576,)), "gate_up": (576, (1536, 1536)), "down": (1536, (576,))}
ROWS = (1, 4, 16, 32, 64, 128, 256)
ADAPTERS = (1, 2, 4, 8)
RANK = 16
COPIES = 16
REPEATS = 7
ADAPTERS_PACKED = 4


def _stacks(shape: tuple[int, tuple[int, ...]], adapters: int) -> list[AdapterStack]:
    size_in, out_sizes = shape
    return [
        AdapterStack(
            [torch.randn(adapters, 1, RANK, size_in, dtype=torch.bfloat16) * 0.04 for _ in out_sizes],
            [torch.randn(adapters, 1, out, RANK, dtype=torch.bfloat16) * 0.05 for out in out_sizes],
            out_sizes,
        )
        for _ in range(COPIES)
    ]


def _first_product_cpu_us(stacks: list[AdapterStack]) -> float:
    """Mean CPU time of the first product of a layer, which packs its adapters, for rows of all of them."""
    adapters, size_in = stacks[0].a[0].shape[0], stacks[0].a[0].shape[-1]
    group = StepGroup(RowGroup(tuple(range(16)), tuple(row % adapters for row in range(16))))
    x = torch.randn(16, size_in, dtype=torch.bfloat16)
    y = torch.randn(16, sum(stacks[0].out_sizes), dtype=torch.bfloat16)
    start = time.process_time_ns()
    for stack in stacks:
        stack.add_product(y, x, (group,), 1.0)
    return (time.process_time_ns() - start) / 1000 / len(stacks)


def _product_us(stacks: list[AdapterStack], rows: int, adapters: int, gathered: bool) -> float:
    """Median time of one product of ``rows`` rows that use all ``adapters`` in turn."""
    step = 2 if gathered else 1
    slots = tuple(row % adapters for row in range(rows))
    group = StepGroup(RowGroup(tuple(range(0, rows * step, step)), slots))
    x = torch.randn(rows * step, stacks[0].a[0].shape[-1], dtype=torch.bfloat16)
    y = torch.randn(rows * step, sum(stacks[0].out_sizes), dtype=torch.bfloat16)
    times_us = []
    for repeat in range(2 + REPEATS):
        start = time.perf_counter_ns()
        for stack in stacks:
            stack.add_product(y, x, (group,), 1.0)
        if repeat >= 2:
            times_us.append((time.perf_counter_ns() - start) / 1000 / len(stacks))
    return statistics.median(times_us)


def fit(samples: list[tuple[int, int, bool, float]]) -> CpuLoraCosts:
    """The coefficients for ``samples`` of (rows, ranks, gathered, microseconds), by relative error, none below zero."""
    matrix = np.array(
        [[1, gathered, gathered * rows, rows, ranks, rows * ranks] for rows, ranks, gathered, _ in samples], float
    )
    times_us = np.array([us for *_, us in samples])
    matrix /= times_us[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    matrix /= scale
    # Coordinate descent: six unknowns, no dependency.
    solution = np.zeros(matrix.shape[1])
    gram, target = matrix.T @ matrix, matrix.sum(0)
    for _ in range(20_000):
        for index in range(len(solution)):
            rest = target[index] - gram[index] @ solution + gram[index, index] * solution[index]
            solution[index] = max(rest / gram[index, index], 0.0)
    return CpuLoraCosts(*(round(float(value), 4) for value in solution / scale))


def main() -> None:
    """Measure, fit and print; with ``--json`` the last line is the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", type=Path, help="also write the costs into this table file, for engines on this CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    samples = []
    pack_us = 0.0
    with torch.no_grad():
        for name, shape in SHAPES.items():
            for adapters in ADAPTERS:
                stacks = _stacks(shape, adapters)
                if adapters == ADAPTERS_PACKED:
                    pack_us += _first_product_cpu_us(stacks)
                for rows in (rows for rows in ROWS if rows >= adapters):
                    for gathered in (False, True) if rows > 1 else (False,):
                        us = _product_us(stacks, rows, adapters, gathered)
                        samples.append((rows, adapters * RANK, gathered, us))
                print(f"{name}, {adapters} adapters of rank {RANK}: done", file=sys.stderr, flush=True)
    costs = fit(samples)
    if arguments.table is not None:
        table = PartitionTable(cpu_key(RANK, vllm_version()), cpu_costs=costs)
        write_durably(arguments.table, to_text(table))
    errors = [abs(costs.product_us(rows, ranks, gathered=g) / us - 1) for rows, ranks, g, us in samples]
    result: dict[str, Any] = {
        "costs": asdict(costs),
        f"first_product_of_a_layer_with_{ADAPTERS_PACKED}_adapters_cpu_us": round(pack_us),
        "median_error": round(statistics.median(errors), 3),
        "hardware": hardware(arguments.threads),
    }
    print(json.dumps(result) if arguments.json else costs)


if __name__ == "__main__":
    main()
