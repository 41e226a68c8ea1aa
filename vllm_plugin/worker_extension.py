"""What an engine replica may ask the workers of its engine (vLLM ``worker_extension_cls``)."""

from __future__ import annotations

from vllm_plugin import status


class HaloWorkerExtension:
    """Methods added to vLLM's worker class, called through ``collective_rpc``."""

    def halo_parts(self) -> dict[str, str]:
        """The parts of the plug-in in this worker process and what each did; see :func:`vllm_plugin.status.active`."""
        parts = status.active()
        # Streams are made after the plug-in was installed; what became of them is known only now.
        from vllm_plugin.lora_overlap import current_state  # noqa: PLC0415

        overlap = current_state()
        return parts if overlap is None else parts | {"lora_overlap": overlap}
