"""The committed adapters do their jobs on the default model, seen with transformers and PEFT in fp32."""

from pathlib import Path
from typing import Any

import pytest

from app.default_model import prepare_default_model
from scripts.answer_formats import decisive_part, has_format
from scripts.compose_examples import SERVICES, load

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 72

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="needs the `train` extra")


@pytest.fixture(scope="session")
def base() -> tuple[Any, Any]:
    """The default model in fp32 and its tokenizer."""
    from scripts.adapter_training import load_base  # noqa: PLC0415

    return load_base(prepare_default_model(ROOT / ".cache" / "models"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("service", SERVICES)
def test_adapter_does_what_the_base_does_not(service: str, base: tuple[Any, Any]) -> None:
    """On three held-out prompts the base model never answers in the service's format; the adapter always does.

    The adapter also ends its answers by itself and gets the decisive lines of at least one right.
    """
    from scripts.adapter_training import greedy, load_adapter  # noqa: PLC0415

    model, tokenizer = base
    chats = load(service, "heldout")[::8][:3]
    plain = greedy(model, tokenizer, chats, MAX_TOKENS)
    wrapped = load_adapter(model, ROOT / "adapters" / service)
    adapted = greedy(wrapped, tokenizer, chats, MAX_TOKENS)
    wrapped.unload()

    assert [has_format(service, text) for text, _ in plain] == [False] * 3
    assert [has_format(service, text) for text, _ in adapted] == [True] * 3
    assert [ended for _, ended in adapted] == [True] * 3
    references = [chat["messages"][-1]["content"] for chat in chats]
    assert any(
        decisive_part(service, text) == decisive_part(service, reference)
        for (text, _), reference in zip(adapted, references, strict=True)
    )


def test_unloading_an_adapter_gives_the_base_back(base: tuple[Any, Any]) -> None:
    """The fixture is shared: after an adapter was used, the base model's answer is what it was before."""
    from scripts.adapter_training import greedy, load_adapter  # noqa: PLC0415

    model, tokenizer = base
    chats = load(SERVICES[0], "heldout")[:1]
    before = greedy(model, tokenizer, chats, 16)
    load_adapter(model, ROOT / "adapters" / SERVICES[0]).unload()
    assert greedy(model, tokenizer, chats, 16) == before
