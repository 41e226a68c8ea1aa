"""The engine's answers are the model's: greedy token ids against transformers and PEFT in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.compose_examples import load
from tests.vllm.engine_bench import SERVICES, Ask, Bench
from vllm_plugin.scheduler import HaloScheduler

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24
# Where the two best logits are this close, correct implementations may choose differently.
TIE = 1e-3


@pytest.fixture(scope="module")
def reference(default_model: Path) -> tuple[Any, Any]:
    """The default model in transformers, float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(default_model)


def rendered(tokenizer: Any, question: str) -> str:
    """The chat prompt for one user message, as text."""
    chat = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def assert_greedy(model: Any, prompt_ids: list[int], tokens: list[int]) -> None:
    """Each of ``tokens`` is the model's best next token after those before it, or tied with the best."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, len(prompt_ids) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert (best - chosen).max().item() <= TIE


@pytest.mark.timeout(300)
def test_base_model_answers_like_transformers(bench: Bench, reference: tuple[Any, Any]) -> None:
    """The base model's answer is the one transformers gives."""
    model, tokenizer = reference
    prompt = rendered(tokenizer, "What is the capital of France?")
    bench.use(HaloScheduler, "halo-paper", batch=64)
    tokens = bench.run([Ask(prompt, tokens=8, ignore_eos=False)]).tokens[0]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert_greedy(model, tokenizer(prompt)["input_ids"], tokens)


@pytest.mark.timeout(300)
def test_services_answer_like_peft(bench: Bench, reference: tuple[Any, Any]) -> None:
    """All four services and the base model, in one batch: every token is the one PEFT's model would choose."""
    from peft import PeftModel  # noqa: PLC0415

    model, tokenizer = reference
    prompts = [rendered(tokenizer, load(name, "heldout")[0]["messages"][-2]["content"]) for name in SERVICES]
    asks = [Ask(prompt, name, TOKENS, ignore_eos=False) for name, prompt in zip(SERVICES, prompts, strict=True)]
    bench.use(HaloScheduler, "halo-paper", batch=64)
    run = bench.run([*asks, Ask(prompts[0], tokens=TOKENS, ignore_eos=False)])
    assert_greedy(model, tokenizer(prompts[0])["input_ids"], run.tokens[-1])
    for name, prompt, tokens in zip(SERVICES, prompts, run.tokens, strict=False):
        adapted = PeftModel.from_pretrained(model, ROOT / "adapters" / name)
        try:
            assert_greedy(adapted, tokenizer(prompt)["input_ids"], tokens)
        finally:
            model = adapted.unload()
