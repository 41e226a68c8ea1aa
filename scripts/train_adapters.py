"""Train and score the four demonstration adapters.

``python -m scripts.train_adapters --service all`` trains every adapter on ``examples/services`` and writes it to
``adapters/<service>``; ``--score-only`` only scores what is there. Needs the ``train`` extra. See docs/adapters.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.default_model import DEFAULT_CACHE, HUB_NAME, prepare_default_model
from deployments.durable_file import write_durably
from scripts.adapter_training import (
    Recipe,
    greedy,
    load_adapter,
    load_base,
    new_adapter,
    save_adapter,
    train,
)
from scripts.answer_formats import decisive_part, has_format
from scripts.compose_examples import SERVICES, load

ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
MAX_ADAPTER_BYTES = 2_000_000

RECIPES = {
    "intelligent-triage": Recipe(rank=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"), epochs=6),
    "pre-assessment": Recipe(rank=16, targets=("v_proj", "o_proj"), epochs=4),
    "analysis-assistant": Recipe(rank=8, targets=("o_proj", "down_proj")),
    "record-generation": Recipe(rank=32, targets=("v_proj",)),
}
PURPOSES = {
    "intelligent-triage": "reads a complaint and names department, reason and urgency",
    "pre-assessment": "reads a patient's statement and asks five numbered intake questions",
    "analysis-assistant": "reads findings and laboratory values and names findings, what to consider and the next step",
    "record-generation": "turns the notes of a visit into a SOAP note",
}


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of held-out answers, 0 to 1: in the right format, ended by themselves, right in their decisive lines."""

    format: float
    ended: float
    content: float

    def __str__(self) -> str:
        return f"format {self.format:.0%}, ended {self.ended:.0%}, content {self.content:.0%}"


def score(model: Any, tokenizer: Any, service: str) -> Score:
    """Score ``model`` by its greedy answers to all held-out prompts of ``service``."""
    chats = load(service, "heldout")
    answers = greedy(model, tokenizer, chats)
    wanted = [chat["messages"][-1]["content"] for chat in chats]
    right = [
        decisive_part(service, answer) == decisive_part(service, reference)
        for (answer, _), reference in zip(answers, wanted, strict=True)
    ]
    return Score(
        sum(has_format(service, answer) for answer, _ in answers) / len(chats),
        sum(ended for _, ended in answers) / len(chats),
        sum(right) / len(chats),
    )


def train_service(model_dir: Path, service: str) -> None:
    """Train the adapter of ``service`` on the bfloat16 base, twice as fast as fp32 here, and write it with its card."""
    recipe = RECIPES[service]
    model, tokenizer = load_base(model_dir, torch.bfloat16)
    wrapped = new_adapter(model, recipe)
    started = time.monotonic()
    for step, steps, loss in train(wrapped, tokenizer, load(service, "train"), recipe):
        if step % 10 == 0 or step in (1, steps):
            print(
                f"  {service}: step {step} of {steps}, loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True
            )
    size = save_adapter(wrapped, ADAPTERS / service)
    if size > MAX_ADAPTER_BYTES:
        raise ValueError(f"the adapter of {service} has {size} bytes, more than {MAX_ADAPTER_BYTES}: lower its rank")
    write_durably(ADAPTERS / service / "README.md", _card(service, recipe), 0o644)
    print(f"  {service}: wrote {size} bytes to {ADAPTERS / service}")


def _card(service: str, recipe: Recipe) -> str:
    targets = ", ".join(recipe.targets)
    return (
        f"# {service}\n\n"
        f"A LoRA adapter for {HUB_NAME} that {PURPOSES[service]}.\n"
        f"Rank {recipe.rank}, alpha {2 * recipe.rank}, on {targets} of all layers; bfloat16 safetensors.\n\n"
        "For demonstration only. It is not a medical device, and its answers are not medical advice.\n\n"
        f"Made by `python -m scripts.train_adapters --service {service}` from\n"
        f"`examples/services/{service}.train.jsonl`, which was written for this project. See docs/adapters.md.\n"
    )


def main() -> None:
    """Train, then print base and adapter scores."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_adapters", description=__doc__)
    parser.add_argument("--service", choices=("all", *SERVICES), default="all", help="whose adapter")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="directory that holds prepared models")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--score-only", action="store_true", help="do not train, score what is in adapters/")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model_dir = prepare_default_model(options.cache)
    model, tokenizer = load_base(model_dir)
    for service in SERVICES if options.service == "all" else (options.service,):
        if not options.score_only:
            train_service(model_dir, service)
        print(f"{service}: base    {score(model, tokenizer, service)}", flush=True)
        wrapped = load_adapter(model, ADAPTERS / service)
        print(f"{service}: adapter {score(wrapped, tokenizer, service)}", flush=True)
        model = wrapped.unload()


if __name__ == "__main__":
    main()
