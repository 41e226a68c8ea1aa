"""The profiling pass of an engine at start-up: random prompts of our own, planned by :mod:`scheduling.profiling`."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduling.policy import Limits
from scheduling.profiling import prompt_lengths

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

TIMEOUT_S = 90.0
# More tokens than the pass has steps: no request ends before it.
OUTPUT_TOKENS = 512


async def profile_engine(llm: AsyncLLM, adapters: Sequence[LoRARequest]) -> dict[str, Any] | None:
    """Run the pass over the base model and ``adapters`` in turn. Returns what the scheduler made of it.

    None when it did not end within :data:`TIMEOUT_S`; the policy then learns from the first requests.
    """
    limits, context_tokens = _limits(llm), llm.vllm_config.model_config.max_model_len
    lengths = prompt_lengths(limits, context_tokens)
    found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    choices = [None, *adapters]
    tasks = [
        asyncio.create_task(_run(llm, length, len(lengths), choices[i % len(choices)], found))
        for i, length in enumerate(lengths)
    ]
    ended: list[asyncio.Future[Any]] = [found, asyncio.gather(*tasks, return_exceptions=True)]
    try:
        await asyncio.wait(ended, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if found.done():
        logger.info("profiling pass: %s", found.result())
        return found.result()
    errors = [result for result in results if isinstance(result, Exception)]
    logger.warning("The profiling pass did not end: %s", errors[0] if errors else f"no result within {TIMEOUT_S:g} s")
    return None


def _limits(llm: AsyncLLM) -> Limits:
    config = llm.vllm_config
    return Limits(
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        running=config.scheduler_config.max_num_seqs,
        adapters=config.lora_config.max_loras if config.lora_config else 0,
        kv_blocks=config.cache_config.num_gpu_blocks or 1,
        kv_block_tokens=config.cache_config.block_size,
    )


async def _run(
    llm: AsyncLLM, tokens: int, requests: int, adapter: LoRARequest | None, found: asyncio.Future[dict[str, Any]]
) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    from vllm_plugin.promise import PROFILED_KEY, PROFILING_KEY  # noqa: PLC0415

    request_id = f"profile-{uuid.uuid4().hex}"
    draw = random.Random(request_id)  # noqa: S311 - made-up prompts; different ones, or the prefix cache would answer
    vocabulary = llm.vllm_config.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(tokens)]}
    output_tokens = max(1, min(OUTPUT_TOKENS, llm.vllm_config.model_config.max_model_len - tokens))
    params = SamplingParams(
        max_tokens=output_tokens, temperature=0.0, ignore_eos=True, extra_args={PROFILING_KEY: requests}
    )
    async for output in llm.generate(prompt, params, request_id, lora_request=adapter):
        profiled = (output.kv_transfer_params or {}).get(PROFILED_KEY)
        if profiled is not None:
            if not found.done():
                found.set_result(profiled)
            return
