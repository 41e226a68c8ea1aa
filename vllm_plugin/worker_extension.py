"""What an engine replica may ask the workers of its engine (vLLM ``worker_extension_cls``)."""

from __future__ import annotations

from vllm_plugin import status


class HaloWorkerExtension:
    """Methods added to vLLM's worker class, called through ``collective_rpc``."""

    def halo_parts(self) -> dict[str, str]:
        """The parts of the plug-in in this worker process and what each did; see :func:`vllm_plugin.status.active`."""
        return status.active()
