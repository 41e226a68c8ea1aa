"""What LoRA costs on the CPU: step times with stock vLLM's LoRA and with ours, over the same engine without LoRA.

    python -m benchmarks.lora_cpu [--json]

Three engines live side by side in processes of their own (without LoRA, stock LoRA, ours) and take turns: every round
measures every case on each of them, so that what else the machine does hits all three alike. A ratio is the median over
the rounds of the ratio of the round's median step times. All three run eagerly: LoRA turns vLLM's compilation off on
CPUs (``--compile-base`` lets the engine without LoRA compile all the same; it takes a C++ compiler and a minute more).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODEL = Path(".cache/models/smollm2-135m-instruct")
RANKS = (8, 16, 32, 8)
BATCHES = (1, 4, 16, 32)
CHUNK_TOKENS = 256
DECODE_STEPS, PREFILL_STEPS = 8, 2
ENGINES = ("base", "stock", "ours")
ANSWER_TIMEOUT_S = 300
ROUNDS_MIN = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: ``batch`` decodes whose adapters alternate, or (batch 0) one prefill chunk of one adapter."""

    name: str
    batch: int
    with_adapters: bool = True


CASES = (
    *(Case(str(batch), batch) for batch in BATCHES),
    Case("prefill", 0),
    Case("16 without adapters", 16, with_adapters=False),
)


class Engine:
    """An engine in a process of its own, which answers one case at a time."""

    def __init__(self, kind: str, model: Path, adapters: Sequence[Path], threads: int, compiled: bool) -> None:
        self.kind = kind
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # vLLM and OpenMP read these when they are imported, so they must be there when the process starts.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_PLUGINS="",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS=str(threads),
        )
        self._process = context.Process(
            target=_serve, args=(theirs, kind, model, list(adapters), compiled), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, case: Case | None = None) -> list[float]:
        """Step times of ``case`` in microseconds; without a case wait until the engine is ready."""
        if case is not None:
            self._connection.send(case)
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the engine '{self.kind}' did not answer within {ANSWER_TIMEOUT_S} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the engine '{self.kind}' ended; its last lines are above") from None
        if isinstance(answer, str):
            raise RuntimeError(f"the engine '{self.kind}' failed: {answer}")
        return list(answer)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, kind: str, model: Path, adapters: list[Path], compiled: bool) -> None:
    os.dup2(2, 1)  # standard output is for the result; whatever vLLM prints goes to the other one
    try:
        if kind == "ours":
            import vllm_plugin  # noqa: PLC0415
            from vllm_plugin.cpu_lora import is_active  # noqa: PLC0415

            vllm_plugin.register()
            if not is_active():
                raise RuntimeError("the plug-in's LoRA is not active on this platform")
        from vllm_plugin.step_timer import SteppedEngine  # noqa: PLC0415

        engine = SteppedEngine(
            model,
            adapters if kind != "base" else [],
            chunk_tokens=CHUNK_TOKENS,
            sequences=max(BATCHES),
            eager=not compiled,
        )
        connection.send([])
        while True:
            case = connection.recv()
            used = [number if case.with_adapters else None for number in range(max(case.batch, 1))]
            if case.batch:
                connection.send(engine.decode_us(used, DECODE_STEPS))
            else:
                # Rank 16, the second adapter: the chunk of one request never mixes adapters.
                connection.send(engine.prefill_us(1, CHUNK_TOKENS, PREFILL_STEPS))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def write_adapters(model: Path, folder: Path) -> list[Path]:
    """Random adapters of `RANKS` on every linear layer of the Llama-shaped ``model``, as PEFT saves them."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layers = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = np.random.default_rng(0)
    paths = []
    for number, rank in enumerate(RANKS):
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (size_in, size_out) in layers.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                a = generator.standard_normal((rank, size_in), dtype=np.float32) / size_in**0.5
                tensors[f"{prefix}.lora_A.weight"] = a
                tensors[f"{prefix}.lora_B.weight"] = 0.01 * generator.standard_normal(
                    (size_out, rank), dtype=np.float32
                )
        path = folder / f"rank-{rank}-{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        names = sorted(name.split(".")[1] for name in layers)
        adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(adapter))
        paths.append(path)
    return paths


def measure(engines: Sequence[Engine], rounds: int, budget_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Ratios per case, their spread and the step times, from ``rounds`` rounds or as many as ``budget_s`` allows."""
    medians: dict[tuple[str, str], list[float]] = {(e.kind, case.name): [] for e in engines for case in CASES}
    start = time.monotonic()
    for done in range(1 + rounds):  # the first round warms up and does not count
        if done > ROUNDS_MIN and time.monotonic() - start > budget_s:
            say(f"stopping after {done - 1} rounds: {budget_s:.0f} s are over")
            break
        for case in CASES:
            times = {engine.kind: statistics.median(engine.ask(case)) for engine in engines}
            label = "warm-up" if done == 0 else f"round {done}/{rounds}"
            say(f"{label}, {case.name}: " + ", ".join(f"{kind} {us / 1000:.1f} ms" for kind, us in times.items()))
            if done:
                for kind, us in times.items():
                    medians[kind, case.name].append(us)
    return _result(medians)


def _result(medians: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    def ratios(kind: str, case: str) -> list[float]:
        return [us / base for us, base in zip(medians[kind, case], medians["base", case], strict=True)]

    names = [case.name for case in CASES if case.with_adapters]
    bare = [case.name for case in CASES if not case.with_adapters]
    return {
        "stock_over_base": {name: round(statistics.median(ratios("stock", name)), 3) for name in names},
        "ours_over_base": {name: round(statistics.median(ratios("ours", name)), 3) for name in names},
        "ours_over_base_range": {
            name: [round(min(ratios("ours", name)), 3), round(max(ratios("ours", name)), 3)] for name in names
        },
        "without_adapters_over_base": {
            kind: {name.split()[0]: round(statistics.median(ratios(kind, name)), 3) for name in bare}
            for kind in ("stock", "ours")
        },
        "step_ms": {
            kind: {name: round(statistics.median(medians[kind, name]) / 1000, 2) for name in names} for kind in ENGINES
        },
        "rounds": len(medians["base", names[0]]),
    }


def hardware(threads: int) -> dict[str, Any]:
    """The machine the numbers are of."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "threads": threads, "system": platform.platform()}


def main() -> None:
    """Measure and print; with ``--json`` the last line is the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of a Llama-shaped checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=360.0, help="stop after this many seconds of rounds")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="per engine")
    parser.add_argument("--compile-base", action="store_true", help="let the engine without LoRA compile")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"no model in {arguments.model}: fetch the default model first, or name one with --model")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    engines: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="lora-cpu-") as folder:
        adapters = write_adapters(arguments.model, Path(folder))
        try:
            for kind in ENGINES:
                say(f"starting the engine '{kind}'")
                compiled = arguments.compile_base and kind == "base"
                engines.append(Engine(kind, arguments.model, adapters, arguments.threads, compiled))
                engines[-1].ask()
            result = measure(engines, arguments.rounds, arguments.budget_s, say)
        finally:
            for engine in engines:
                engine.close()
    result["base_compiled"] = arguments.compile_base
    result["model"] = arguments.model.name
    result["hardware"] = hardware(arguments.threads)
    if arguments.json:
        print(json.dumps(result))
        return
    for kind in ("stock", "ours"):
        print(kind, ", ".join(f"{name}: {ratio}" for name, ratio in result[f"{kind}_over_base"].items()))


if __name__ == "__main__":
    main()
