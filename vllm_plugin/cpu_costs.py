"""The costs by which rows are grouped on this CPU: measured ones from a table file, or the defaults.

``python -m benchmarks.lora_cpu_costs --table FILE`` writes such a file; ``HALO_CPU_COSTS`` names it. A file that
is damaged or of another CPU is refused, with the reason in the log, and the defaults hold.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

from partition.cpu_paths import CpuLoraCosts
from partition.table import TableKey, TableRefusedError, from_text

logger = logging.getLogger(__name__)

COSTS_VARIABLE = "HALO_CPU_COSTS"


def cpu_key(rank: int, vllm: str) -> TableKey:
    """The key of a table of costs on this machine. Shapes are in the costs themselves, so no model is named."""
    return TableKey(cpu_name(), 0, 0, platform.machine(), "any", 1, (rank,), 0, vllm)


def cpu_name() -> str:
    """The processor as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def measured_costs(path: str | None = None) -> CpuLoraCosts:
    """The costs in the file at ``path`` (`COSTS_VARIABLE` unless given) if they are this CPU's, else the defaults."""
    path = path or os.environ.get(COSTS_VARIABLE)
    if not path:
        return CpuLoraCosts()
    try:
        table = from_text(Path(path).read_text(encoding="utf-8"), None)
        if table.key.device != cpu_name():
            raise TableRefusedError(f"it was made on {table.key.device}, this is {cpu_name()}")
        if table.cpu_costs is None:
            raise TableRefusedError("it holds no costs of a CPU")
    except (OSError, UnicodeDecodeError, TableRefusedError) as error:
        logger.warning("the cost table %s is not used: %s; the default costs hold", path, error)
        return CpuLoraCosts()
    return table.cpu_costs
