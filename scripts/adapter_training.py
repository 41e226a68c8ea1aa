"""LoRA training and greedy decoding of small adapters with PEFT, on CPU.

The loss covers the assistant's tokens and the end-of-turn token, so that a served adapter stops by itself. Needs the
``train`` extra (PEFT).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.default_model import HUB_NAME
from deployments.durable_file import write_durably

MAX_TOKENS = 256
IGNORED = -100

Chat = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is trained. ``targets`` are the linear layers that get a low-rank pair in all 30 blocks."""

    rank: int
    targets: tuple[str, ...]
    learning_rate: float = 1.5e-3
    epochs: int = 5
    batch: int = 8
    seed: int = 20260730


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one chat; ``labels`` are IGNORED where the token is part of the prompt. Equal lengths."""

    ids: list[int]
    labels: list[int]


def load_base(model_dir: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The base model in ``dtype`` and its tokenizer, set up for batched generation (padding on the left)."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    return model.eval(), tokenizer


def encode(tokenizer: Any, chat: Chat) -> Encoded:
    """Tokenise ``chat``, whose last message is the answer. ValueError when it is longer than MAX_TOKENS."""
    *prompt, answer = chat["messages"]
    prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    answer_ids = [*tokenizer(answer["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = prompt_ids + answer_ids
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"a chat has {len(ids)} tokens, more than {MAX_TOKENS}: {prompt[-1]['content'][:60]!r}")
    return Encoded(ids, [IGNORED] * len(prompt_ids) + answer_ids)


def train(model: Any, tokenizer: Any, chats: list[Chat], recipe: Recipe) -> Iterator[tuple[int, int, float]]:
    """Train the active adapter of ``model`` in place, yielding (step, steps, loss) after each optimizer step."""
    examples = [encode(tokenizer, chat) for chat in chats]
    rng = random.Random(recipe.seed)  # noqa: S311
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * math.ceil(len(examples) / recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_then_cosine(step, steps))
    model.train()
    done = 0
    for _ in range(recipe.epochs):
        for batch in _batches(examples, recipe.batch, rng):
            loss = _loss(model.get_base_model(), batch, tokenizer.pad_token_id)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss became {loss.item()} at step {done + 1}; lower the learning rate")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            yield done, steps, loss.item()
    model.eval()


def new_adapter(model: Any, recipe: Recipe) -> Any:
    """``model`` wrapped with a fresh fp32 adapter: alpha is twice the rank, A is random, B is zero."""
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        lora_dropout=0.05,
        target_modules=list(recipe.targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def save_adapter(model: Any, directory: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors (bfloat16); return the size of the latter in bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model)
    halved = {name: tensors[name].detach().to(torch.bfloat16).contiguous() for name in sorted(tensors)}
    config = model.peft_config["default"]
    config.base_model_name_or_path = HUB_NAME
    config.inference_mode = True
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    content = save(halved, metadata={"format": "pt"})
    write_durably(directory / "adapter_model.safetensors", content, 0o644)
    write_durably(directory / "adapter_config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n", 0o644)
    return len(content)


def load_adapter(model: Any, directory: Path) -> Any:
    """``model`` wrapped with the adapter in ``directory``; ``unload()`` of the result gives the base back."""
    return PeftModel.from_pretrained(model, directory).eval()


def greedy(model: Any, tokenizer: Any, chats: list[Chat], max_tokens: int = 96) -> list[tuple[str, bool]]:
    """Answer the prompt of each chat greedily: (text, whether it ended by itself within ``max_tokens``)."""
    prompts = [
        tokenizer.apply_chat_template(chat["messages"][:-1], add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        rows = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    answers = rows[:, inputs["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).any(dim=1).tolist()
    return list(zip(tokenizer.batch_decode(answers, skip_special_tokens=True), ended, strict=True))


def _loss(model: Any, batch: list[Encoded], pad: int) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens; logits are computed only where one is predicted."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + [pad] * (longest - len(example.ids)) for example in batch])
    labels = torch.tensor([example.labels + [IGNORED] * (longest - len(example.ids)) for example in batch])
    mask = torch.tensor([[1] * len(example.ids) + [0] * (longest - len(example.ids)) for example in batch])
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    following = labels[:, 1:]
    predicted = following != IGNORED
    logits = model.lm_head(hidden[:, :-1][predicted])
    return torch.nn.functional.cross_entropy(logits.float(), following[predicted])


def _batches(examples: list[Encoded], size: int, rng: random.Random) -> list[list[Encoded]]:
    """Batches of similar lengths in random order, so that little is padded."""
    shuffled = rng.sample(examples, len(examples))
    by_length = sorted(shuffled, key=lambda example: len(example.ids))
    batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    rng.shuffle(batches)
    return batches


def _warm_then_cosine(step: int, steps: int) -> float:
    """Learning-rate factor: linear over the first tenth, then a half cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
