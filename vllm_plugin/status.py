"""What the plug-in did in this process.

vLLM only logs a plug-in that fails (``vllm/plugins/__init__.py``) and serves on without it. An engine replica therefore
asks here, after the engine's modules are loaded, and refuses to serve when something is missing.
"""

from __future__ import annotations

from collections.abc import Callable

_FAILED = "failed: "
_record: dict[str, str] = {}


def install(part: str, install_part: Callable[[], str]) -> None:
    """Run ``install_part`` and record its answer under ``part``; a failure is recorded and raised again."""
    try:
        _record[part] = install_part()
    except Exception as error:
        _record[part] = f"{_FAILED}{type(error).__name__}: {error}"
        raise


def active() -> dict[str, str]:
    """Each part of the plug-in and what it did; empty if `vllm_plugin.register` never ran in this process."""
    return dict(_record)


def failures() -> dict[str, str]:
    """The parts that failed and why."""
    return {part: state for part, state in _record.items() if state.startswith(_FAILED)}
