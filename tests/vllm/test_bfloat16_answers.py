"""Services in bfloat16 under a changing load: what the shipped configuration runs, with its own LoRA kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.compose_examples import load
from tests.vllm.engine_bench import SERVICES, Ask, Bench
from vllm_plugin.scheduler import HaloScheduler

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 40
# bfloat16 moves a logit by about one here; a token that float32 puts this far behind its best was computed wrongly.
ROUNDING = 0.7


@pytest.fixture(scope="module")
def bfloat16_bench(default_model: Path) -> Iterator[Bench]:
    """An engine in the shipped precision."""
    bench = Bench(default_model, dtype="bfloat16")
    yield bench
    bench.close()


@pytest.mark.timeout(400)
def test_every_token_is_the_services_own(bfloat16_bench: Bench, default_model: Path) -> None:
    """Forty requests of all services and the base model, coming and going: no token comes from another's adapter."""
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    rng = random.Random(1)
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    asks = [ask(rng, tokenizer, name) for name in rng.choices(("", *SERVICES), k=REQUESTS)]
    bfloat16_bench.use(HaloScheduler, "halo-paper", batch=64)
    run = bfloat16_bench.run(asks, arrive_at_step=[rng.randrange(100) for _ in asks])

    base = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    wrong = []
    for name in ("", *SERVICES):
        model = PeftModel.from_pretrained(base, ROOT / "adapters" / name) if name else base
        for request, tokens in zip(asks, run.tokens, strict=True):
            if request.service == name:
                wrong += [(name, *fault) for fault in faults(model, tokenizer(request.prompt)["input_ids"], tokens)]
        base = model.unload() if name else base
    assert wrong == []


def ask(rng: random.Random, tokenizer: Any, name: str) -> Ask:
    """A held-out question of service ``name``; the base model gets one of the first service's."""
    chat = rng.choice(load(name or SERVICES[0], "heldout"))["messages"][:-1]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return Ask(prompt, name, rng.randint(20, 60), 4000, rng.choice((200, 400, 800)), ignore_eos=False)


def faults(model: Any, prompt_ids: list[int], tokens: list[int]) -> list[tuple[int, float]]:
    """Positions whose token float32 puts more than ``ROUNDING`` behind its best, and how far."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, len(prompt_ids) - 1 : -1]
    behind = logits.max(dim=-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    return [(position, gap) for position, gap in enumerate(behind.tolist()) if gap > ROUNDING][:1]
