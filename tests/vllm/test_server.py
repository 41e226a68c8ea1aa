"""The whole application with the real engine: `halo serve` with the shipped cluster.yaml, asked by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from app.config import load_cluster
from benchmarks.server import free_port, running_server
from scripts.answer_formats import has_format
from scripts.compose_examples import load
from tests.vllm.engine_bench import SERVICES

ROOT = Path(__file__).resolve().parents[2]
BASE = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DEEP_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000}}
QUESTION = {"role": "user", "content": "My chest hurts when I climb stairs. I am 65."}


@pytest.fixture(scope="module")
def url(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server started as an operator starts it; afterwards nothing of it may be left."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    config = load_cluster(ROOT / "cluster.yaml").derive(folder / "cluster.yaml", {}, port=port)
    with running_server(config.path, ("127.0.0.1", port), folder / "server.log") as server:
        yield server.url
        started = psutil.Process(server.process.pid).children(recursive=True)
    assert started
    assert psutil.wait_procs(started, timeout=5)[1] == []


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    """OpenAI's SDK, without retries."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(url: str, path: str, **body: Any) -> httpx.Response:
    """POST ``body`` to a generating route."""
    return httpx.post(url + path, json=body, timeout=120)


def chat_body(**changes: Any) -> dict[str, Any]:
    """A short greedy chat request, changed as asked."""
    return {"model": SERVICES[0], "messages": [QUESTION], "max_tokens": 8, "temperature": 0, **changes}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended properly."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(stream: list[dict[str, Any]]) -> str:
    """The text of the first choice of a chat stream."""
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in stream if e["choices"])


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_all_services_at_once(url: str) -> None:
    """Sixteen streams and five whole answers at once: streamed text equals the whole one, each service does its job."""

    async def streamed(model: str, messages: list[Any]) -> str:
        stream = await sdk.chat.completions.create(
            model=model, messages=messages, stream=True, max_tokens=96, temperature=0
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def whole(model: str, messages: list[Any]) -> str:
        answer = await sdk.chat.completions.create(model=model, messages=messages, max_tokens=96, temperature=0)
        return answer.choices[0].message.content or ""

    prompts = {name: load(name, "heldout")[0]["messages"][:-1] for name in SERVICES}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as sdk:
        answers = await asyncio.gather(
            *(streamed(name, prompts[name]) for name in SERVICES for _ in range(4)),
            *(whole(name, prompts[name]) for name in SERVICES),
            whole(BASE, [QUESTION]),
        )
    for position, name in enumerate(SERVICES):
        # In bfloat16 the batch a request happens to be in may change a token; the job is done all the same.
        texts = [*answers[4 * position : 4 * position + 4], answers[16 + position]]
        assert [text for text in texts if not has_format(name, text)] == []
    assert not any(has_format(name, answers[20]) for name in SERVICES)


@pytest.mark.timeout(300)
def test_models_and_slo(url: str, client: OpenAI) -> None:
    """/v1/models lists the services and the base model; /slo counts what was asked, with its promise."""
    assert {model.id for model in client.models.list()} == {*SERVICES, BASE}
    before = httpx.get(f"{url}/slo").json()
    client.chat.completions.create(model=SERVICES[1], messages=[QUESTION], max_tokens=4)  # type: ignore[list-item]
    text = httpx.get(f"{url}/slo", headers={"accept": "text/plain"}).text
    assert all(name in text for name in SERVICES)
    after = httpx.get(f"{url}/slo").json()
    assert after != before


WRONG: list[tuple[str, str, dict[str, Any], int]] = [
    ("unknown model", CHAT, {"model": "nobody"}, 404),
    ("bias on an id outside the vocabulary", CHAT, {"logit_bias": {"191222": -100}}, 400),
    ("bias on a word", CHAT, {"logit_bias": {"AI": 1}}, 400),
    ("empty bias", CHAT, {"logit_bias": {}}, 200),
    ("seed above 64 bits", CHAT, {"seed": 2**64}, 400),
    ("seed above int64", CHAT, {"seed": 2**63}, 400),
    ("seed of minus one", CHAT, {"seed": -1}, 200),
    ("stream_options without stream", CHAT, {"stream_options": {"include_usage": True}}, 400),
    ("zero max_tokens", CHAT, {"max_tokens": 0}, 400),
    ("negative max_tokens", CHAT, {"max_tokens": -1}, 400),
    ("negative temperature", CHAT, {"temperature": -1}, 400),
    ("messages of the wrong type", CHAT, {"messages": "hello"}, 400),
    ("no messages", CHAT, {"messages": []}, 400),
    ("empty stop", CHAT, {"stop": ""}, 400),
    ("no stop", CHAT, {"stop": None}, 200),
    ("stop list without entries", CHAT, {"stop": []}, 200),
    ("zero choices", CHAT, {"n": 0}, 400),
    ("too many logprobs", CHAT, {"logprobs": True, "top_logprobs": 5000}, 400),
    ("response format nobody knows", CHAT, {"response_format": {"type": "poem"}}, 400),
    ("top_k beyond 64 bits", CHAT, {"top_k": 2**70, "temperature": 1}, 400),
    ("beam search", CHAT, {"use_beam_search": True, "n": 2}, 400),
    ("a regex nobody can compile", CHAT, {"structured_outputs": {"regex": "(["}}, 400),
    ("a grammar nobody can parse", CHAT, {"structured_outputs": {"grammar": "root ::= ("}}, 400),
    (
        "tool arguments nested too deep",
        CHAT,
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [DEEP_CALL]}, QUESTION]},
        400,
    ),
    ("a million wrong messages", CHAT, {"messages": [7] * 1_000_000}, 400),
    ("empty prompt", COMPLETIONS, {"prompt": ""}, 400),
    ("prompt tokens outside the vocabulary", COMPLETIONS, {"prompt": [99_999_999]}, 400),
    ("prompt without tokens", COMPLETIONS, {"prompt": []}, 400),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRONG, ids=[what for what, *_ in WRONG])
def test_wrong_requests(url: str, case: tuple[str, str, dict[str, Any], int], stream: bool) -> None:
    """A client's mistake is a 4xx with OpenAI's envelope, streaming or not, never a 5xx and never inside a 200."""
    what, path, changes, status = case
    body = chat_body() if path == CHAT else {"model": SERVICES[0], "prompt": "Hello", "max_tokens": 4}
    body |= changes
    if stream and what != "stream_options without stream":
        body["stream"] = True
    response = httpx.post(url + path, json=body, timeout=120)
    assert response.status_code == status, response.text
    if status >= 400:
        error = response.json()["error"]
        assert error["message"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert "Traceback" not in response.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_beyond_the_context(url: str, stream: bool) -> None:
    """A prompt longer than the context is refused with both counts, before it is queued."""
    messages = [{"role": "user", "content": "word " * 9000}]
    response = ask(url, CHAT, **chat_body(messages=messages, stream=stream))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    assert "9031" in error["message"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "raw", ['{"model":', "[]", '"x"', "", '{"model":"intelligent-triage","temperature":NaN}', "\xff"]
)
def test_malformed_json(url: str, raw: str) -> None:
    """A body that is no JSON object is refused as such."""
    response = httpx.post(url + CHAT, content=raw.encode("latin-1"), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.timeout(300)
def test_usage_chunk(url: str) -> None:
    """Usage comes in one last chunk without choices, only when asked for (R5)."""
    plain = events(ask(url, CHAT, **chat_body(stream=True)))
    empty = events(ask(url, CHAT, **chat_body(stream=True, stream_options={})))
    null = events(ask(url, CHAT, **chat_body(stream=True, stream_options=None)))
    asked = events(ask(url, CHAT, **chat_body(stream=True, stream_options={"include_usage": True})))
    for stream in (plain, empty, null):
        assert all(not event.get("usage") for event in stream)
    assert [event["choices"] for event in asked if event.get("usage")] == [[]]
    assert asked[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.timeout(300)
def test_stop_text_never_leaks(url: str) -> None:
    """With a stop text that spans tokens, the joined stream equals the whole answer and lacks the stop text (R7)."""
    free = ask(url, CHAT, **chat_body(max_tokens=24)).json()["choices"][0]["message"]["content"]
    stop = free[len(free) // 3 : len(free) // 3 + 12]
    whole = ask(url, CHAT, **chat_body(max_tokens=24, stop=stop)).json()["choices"][0]
    streamed = events(ask(url, CHAT, **chat_body(max_tokens=24, stop=stop, stream=True)))
    assert whole["message"]["content"] == text_of(streamed) == free[: free.index(stop)]
    assert whole["finish_reason"] == "stop"


@pytest.mark.timeout(300)
def test_length_limits(url: str, client: OpenAI) -> None:
    """max_completion_tokens limits like max_tokens and wins over it; completions echo with max_tokens 0 (R9)."""
    five = client.chat.completions.create(
        model=BASE,
        messages=[QUESTION],
        max_completion_tokens=5,
        temperature=0,  # type: ignore[list-item]
    )
    assert five.usage is not None
    assert (five.usage.completion_tokens, five.choices[0].finish_reason) == (5, "length")
    both = ask(url, CHAT, **chat_body(model=BASE, max_tokens=9, max_completion_tokens=3)).json()
    assert both["usage"]["completion_tokens"] == 3
    echo = ask(url, COMPLETIONS, model=BASE, prompt="The capital of France", max_tokens=0, echo=True, logprobs=1)
    assert echo.status_code == 200, echo.text
    assert echo.json()["choices"][0]["text"] == "The capital of France"


@pytest.mark.timeout(300)
def test_every_part_of_a_message_counts(url: str) -> None:
    """Developer text and every text part reach the model; null and empty contents do not break the template (R10)."""

    def prompt_tokens(*messages: dict[str, Any]) -> int:
        response = ask(url, CHAT, **chat_body(messages=list(messages), max_tokens=1))
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    system = {"role": "system", "content": "Be brief."}
    developer = {"role": "developer", "content": "Answer in plain words that anybody understands."}
    parts = [{"type": "text", "text": "My chest hurts."}, {"type": "text", "text": "I am 65 years old."}]
    assert prompt_tokens(system, developer, QUESTION) > prompt_tokens(system, QUESTION) + 5
    assert prompt_tokens({"role": "user", "content": parts}) > prompt_tokens({"role": "user", "content": parts[:1]})
    assert prompt_tokens(QUESTION, {"role": "assistant", "content": ""}, QUESTION) > prompt_tokens(QUESTION)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "null"}}
    answer = ask(
        url,
        CHAT,
        **chat_body(
            messages=[
                QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "none"},
                QUESTION,
            ]
        ),
    )
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.timeout(300)
def test_a_boolean_written_as_text_is_read_as_vllm_reads_it(url: str) -> None:
    """`"stream": "false"` is a whole answer with every token, the same as without the field."""
    asked = ask(url, CHAT, **chat_body(stream="false")).json()
    plain = ask(url, CHAT, **chat_body()).json()
    assert asked["usage"] == plain["usage"]
    assert asked["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]


@pytest.mark.timeout(300)
def test_choices_and_structured_output(url: str) -> None:
    """Several choices stream apart from each other; a JSON schema is obeyed."""
    streamed = events(ask(url, CHAT, **chat_body(n=3, temperature=1.0, seed=1, stream=True)))
    assert {choice["index"] for event in streamed for choice in event["choices"]} == {0, 1, 2}
    schema = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "urgency", "schema": schema}}
    answer = ask(url, CHAT, **chat_body(model=BASE, max_tokens=60, response_format=response_format))
    assert answer.status_code == 200, answer.text
    assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"])["urgent"], bool)


@pytest.mark.timeout(300)
def test_a_client_that_leaves_is_counted_as_cancelled(url: str) -> None:
    """A stream closed after its first chunk ends as cancelled and breaks no promise."""

    def cancelled() -> int:
        return int(httpx.get(f"{url}/slo").json()["services"][SERVICES[0]]["outcomes"]["cancelled"])

    before = cancelled()
    body = chat_body(stream=True, max_tokens=400, ignore_eos=True)
    with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while cancelled() == before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cancelled() == before + 1
