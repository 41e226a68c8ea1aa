"""The engine side: what HALO changes inside vLLM, without forking it."""


def register() -> None:
    """Entry point ``vllm.general_plugins``: vLLM calls it in every process of an engine, possibly more than once.

    A failure is raised, which vLLM only logs; `vllm_plugin.status` keeps it for the replica to see.
    """
    # Imported here: vLLM imports this package while it is itself half imported.
    from vllm_plugin import status  # noqa: PLC0415

    status.install("cpu_lora", _install_cpu_lora)
    status.install("cpu_seeds", _install_cpu_seeds)
    status.install("cpu_waits", _install_cpu_waits)
    status.install("lora_overlap", _install_lora_overlap)


def _install_cpu_lora() -> str:
    from vllm_plugin.cpu_lora import install_cpu_lora  # noqa: PLC0415

    return install_cpu_lora()


def _install_cpu_seeds() -> str:
    from vllm_plugin.cpu_seeds import install_cpu_seeds  # noqa: PLC0415

    return install_cpu_seeds()


def _install_cpu_waits() -> str:
    from vllm_plugin.cpu_waits import install_cpu_waits  # noqa: PLC0415

    return install_cpu_waits()


def _install_lora_overlap() -> str:
    from vllm_plugin.lora_overlap import install_lora_overlap  # noqa: PLC0415

    return install_lora_overlap()
