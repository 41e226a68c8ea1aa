"""The ``args`` section: what is accepted, and the exact list of errors for what is not."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import AppArgs, ConfigErrors, parse_args
from deployments.auth import add_key
from deployments.settings import AdmissionSettings, AuthSettings, GatewaySettings, Overload, ServiceSettings
from scheduling.registry import POLICIES
from scheduling.request import ReleasePolicy
from tests.fakes.checkpoints import lora_tensors, write_adapter, write_model

Args = dict[str, Any]


def errors(args: Any, root: Path, *, files: bool = True) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        parse_args(args, root, files=files)
    return [str(problem) for problem in caught.value.problems]


def changed(args: Args, changes: dict[str, Any]) -> Args:
    """``args`` with values set at dotted paths, like ``services.0.ttft``; DELETE removes one."""
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        section: Any = args
        for part in parents:
            section = section[part]
        if value is DELETE:
            del section[last]
        else:
            section[last] = value
    return args


DELETE = object()


def test_settings(root: Path, args: Args) -> None:
    """Everything the deployments are built with comes from the section; what is not written has its default."""
    parsed = parse_args({**args, "slo_scale": 4, "auth": {"keys_file": None}}, root)
    strict = ServiceSettings("strict", root / "adapters/strict", 4_000_000, 200_000)
    relaxed = ServiceSettings("relaxed", root / "adapters/relaxed", 8_000_000, 800_000, overload=Overload.SHED)
    base = ServiceSettings("base-model", None, 8_000_000, 800_000)
    engine = parsed.engine_settings()
    assert (engine.services, engine.base_promise, engine.base_name) == ((strict, relaxed), base, "base-model")
    assert (engine.model, engine.max_loras, engine.policy) == (str(root / "model"), 2, "halo-paper")
    assert parsed.gateway_settings() == GatewaySettings((strict, relaxed), "base-model", base, AuthSettings(None))
    assert parsed.admission_settings() == AdmissionSettings()


def test_written_values_reach_the_settings(root: Path, args: Args) -> None:
    """Sections beside the services arrive in the settings they belong to."""
    args |= {
        "scheduler": {"policy": "halo-paper", "options": {"batch": 9}},
        "admission": {"inflight_per_replica": 5, "queue_requests": 7, "queue_timeout": "3s", "heartbeat_timeout": "4s"},
        "limits": {"body_mb": 0.5, "stream_timeout": "1min", "pacer_tick": "4ms"},
        "engine_args": {"enforce_eager": True},
        "kv_cache_gb": 2,
        "max_loras": 3,
    }
    parsed = parse_args(args, root)
    engine, gateway = parsed.engine_settings(), parsed.gateway_settings()
    assert engine.engine_args == {"enforce_eager": True}
    assert engine.policy_options == {"batch": 9, "tbt_min_us": 50_000}
    assert (engine.kv_cache_gb, engine.max_loras) == (2.0, 3)
    assert parsed.admission_settings() == AdmissionSettings(5, 7, 3_000_000, 4_000_000)
    assert (gateway.max_body_bytes, gateway.stream_timeout_us, gateway.pacer_tick_us) == (524_288, 60_000_000, 4_000)


@pytest.mark.parametrize("release", [False, "off"])
def test_release_off(root: Path, args: Args, release: object) -> None:
    """YAML reads a bare `off` as false; both mean the release policy."""
    parsed = parse_args(changed(args, {"services.0.release": release}), root)
    assert parsed.service_settings()[0].release is ReleasePolicy.OFF


def test_round_trip(root: Path, args: Args) -> None:
    """What is dumped parses to the same section; with absolute paths it does so from anywhere."""
    parsed = parse_args(changed(args, {"services.0.release": "off", "services.1.hold_max": "0.3s"}), root)
    assert parse_args(parsed.dump(), root).dump() == parsed.dump()
    elsewhere = parse_args(parsed.dump(absolute_paths=True), Path("/"))
    assert elsewhere.engine_settings() == parsed.engine_settings()
    assert elsewhere.gateway_settings() == parsed.gateway_settings()


def test_strictest_tbt_is_the_promised_one(root: Path, args: Args) -> None:
    """A policy that wants the strictest TBT gets that of all services, scaled; an operator's own value stands."""
    args["slo_scale"] = 2
    assert parse_args(args, root).engine_settings().policy_options["tbt_min_us"] == 100_000
    args["scheduler"]["options"]["tbt_min_us"] = 7
    assert parse_args(args, root).engine_settings().policy_options["tbt_min_us"] == 7
    args["scheduler"] = {"policy": "fcfs", "options": {"batch": 8}}
    assert parse_args(args, root).engine_settings().policy_options == {"batch": 8}


def test_relative_paths_start_where_we_run(root: Path, args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a root, paths start at the working directory, in which the server is started."""
    monkeypatch.chdir(root)
    assert parse_args(args).engine_settings() == parse_args(args, root).engine_settings()


def test_service_without_adapter(root: Path, args: Args) -> None:
    """A service may be the base model under another promise, if that is written down."""
    parsed = parse_args(changed(args, {"services.0.adapter": None}), root)
    assert (parsed.service_settings()[0].adapter, parsed.engine_settings().max_loras) == (None, 1)
    assert errors(changed(args, {"services.0.adapter": DELETE}), root) == ["services[0].adapter is missing"]


WRONG_VALUES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": DELETE}, ["model is missing"]),
    ({"model": ""}, ["model = '': must not be empty"]),
    ({"base.tbt": DELETE}, ["base.tbt is missing"]),
    ({"services": []}, ["services is empty; name at least one service"]),
    ({"services": {"a": 1}}, ["services has to be a list"]),
    ({"services.0": "strict"}, ["services[0] = strict: has to be a section of keys and values"]),
    ({"services.1.name": "strict"}, [
        "services[1].name = strict: is the name of services[0] too; every service needs its own"
    ]),
    ({"services.0.name": "base-model"}, [
        "services[0].name = base-model: is also the name of the base model (base.name); "
        "clients could not tell them apart"
    ]),
    ({"services.0.name": "a b"}, [
        "services[0].name = a b: is not usable as a model name: "
        "letters, digits and . _ : / - are allowed, starting with a letter or digit"
    ]),
    ({"services.0.name": "naïve"}, [
        "services[0].name = naïve: is not usable as a model name: "
        "letters, digits and . _ : / - are allowed, starting with a letter or digit"
    ]),
    ({"services.0.name": True}, [
        "services[0].name = true: has to be text. "
        "YAML reads a bare yes, no, on or off as true or false; put it in quotes"
    ]),
    ({"services.0.ttft": 500}, [
        "services[0].ttft = 500: has no unit; write 500ms if milliseconds are meant, 500s if seconds"
    ]),
    ({"services.0.ttft": 0}, ["services[0].ttft = 0: must be longer than zero, with a unit, like 500ms or 0.5s"]),
    ({"services.0.ttft": float("nan")}, [
        "services[0].ttft = .nan: is not a duration; write a number and a unit, like 500ms or 0.5s"
    ]),
    ({"services.0.tbt": "5m"}, [
        "services[0].tbt = 5m: could mean minutes or milliseconds; write 5min or 5ms"
    ]),
    ({"services.0.tbt": "5min"}, ["services[0].tbt = 5min: is 5min; it must be between 1ms and 1min"]),
    ({"services.0.release": "sometimes"}, ["services[0].release = sometimes: has to be one of slo, bounded, off"]),
    ({"services.0.overload": "drop"}, ["services[0].overload = drop: has to be one of queue, shed"]),
    ({"services.0.overload": ["shed"]}, ["services[0].overload has to be one of queue, shed"]),
    ({"services.0.tfft": "1s"}, ["services[0].tfft = 1s: is not a known key. Did you mean ttft?"]),
    ({"ttft": "1s"}, ["ttft = 1s: is not a known key. ttft is a key of args.base and of args.services[]"]),
    ({"slo_scale": 0}, ["slo_scale = 0: has to be greater than or equal to 0.01"]),
    ({"slo_scale": float("inf")}, ["slo_scale = .inf: has to be a finite number"]),
    ({"replicas": "2"}, ["replicas = '2': has to be a whole number"]),
    ({"replicas": True}, ["replicas = true: has to be a whole number"]),
    ({"replicas": 1.5}, ["replicas = 1.5: has to be a whole number"]),
    ({"allow_hub": "yes"}, ["allow_hub = 'yes': has to be true or false"]),
    ({"max_lora_rank": 12}, ["max_lora_rank = 12: has to be 1, 8, 16, 32, 64, 128, 256, 320 or 512"]),
    ({"dtype": "int8"}, [
        "dtype = int8: has to be 'auto', 'float16', 'bfloat16', 'float32', 'half' or 'float'"
    ]),
    ({"kv_cache_gb": -1}, ["kv_cache_gb = -1: has to be greater than 0"]),
    ({"max_loras": 1}, [
        "max_loras = 1: is less than the number of services with an adapter (2): they would shut each other out"
    ]),
    ({"max_num_seqs": 300}, [
        "max_num_batched_tokens = 256: is less than max_num_seqs (300): "
        "a step could not hold one token of every running request"
    ]),
    ({"max_num_batched_tokens": 8}, [
        "max_num_batched_tokens = 8: is less than max_num_seqs (32): "
        "a step could not hold one token of every running request"
    ]),
    ({"scheduler.policy": "halo-papr"}, [
        f"scheduler.policy = halo-papr: is not a scheduling policy; there are {', '.join(POLICIES)}. "
        "Did you mean halo-paper? The options are checked as its own"
    ]),
    ({"scheduler": {"policy": "halo-papr", "options": {"batsh": 8}}}, [
        f"scheduler.policy = halo-papr: is not a scheduling policy; there are {', '.join(POLICIES)}. "
        "Did you mean halo-paper? The options are checked as its own",
        "scheduler.options.batsh = 8: is not a known key. Did you mean batch?",
    ]),
    ({"scheduler": {"policy": "random", "options": {"batsh": 8}}}, [
        f"scheduler.policy = random: is not a scheduling policy; there are {', '.join(POLICIES)}. "
        "Its options are not checked"
    ]),
    ({"scheduler.options.batch": 2_000_000}, [
        "scheduler.options.batch = 2000000: is more than any step computes: max_num_batched_tokens is at most 1048576"
    ]),
    ({"max_num_batched_tokens": 10**9}, [
        "max_num_batched_tokens = 1000000000: has to be less than or equal to 1048576"
    ]),
    ({"max_model_len": 10**30}, [f"max_model_len = {10**30}: has to be less than or equal to 100000000"]),
    ({"max_loras": 10**9}, ["max_loras = 1000000000: has to be less than or equal to 1024"]),
    # A wrong value is not compared with others as if it were the default.
    ({"max_num_seqs": "32", "max_num_batched_tokens": 8}, ["max_num_seqs = '32': has to be a whole number"]),
    ({"max_num_batched_tokens": "8", "max_num_seqs": 512}, [
        "max_num_batched_tokens = '8': has to be a whole number"
    ]),
    ({"max_lora_rank": "1"}, ["max_lora_rank = '1': has to be 1, 8, 16, 32, 64, 128, 256, 320 or 512"]),
    ({"allow_hub": "yes", "model": "org/name"}, ["allow_hub = 'yes': has to be true or false"]),
    ({"tensor_parallel_size": 3.0}, ["tensor_parallel_size = 3.0: has to be a whole number"]),
    ({"scheduler.options": {"batch": 8, "batsh": 8}}, [
        "scheduler.options.batsh = 8: is not a known key. Did you mean batch?"
    ]),
    ({"scheduler.options.batch": 0}, ["scheduler.options.batch = 0: must be at least 1, got 0"]),
    ({"scheduler.options.batch": "8"}, ["scheduler.options.batch = '8': must be a whole number, got '8'"]),
    ({"scheduler.options": [8]}, ["scheduler.options has to be a section of keys and values"]),
    ({"scheduler": None}, ["scheduler = null: has to be a section of keys and values"]),
    ({"engine_args": {"tensor_parallel_size": 2, "scheduler_cls": "x.Y", "load_format": "pt"}}, [
        "engine_args.tensor_parallel_size = 2: is set in another place: write tensor_parallel_size under args",
        "engine_args.scheduler_cls = x.Y: cannot be set: HALO brings its own scheduler",
        "engine_args.load_format = pt: "
        "reads pickle files, which can run code when they are loaded; use safetensors",
    ]),
    ({"base.name": "${NAME}"}, [
        "base.name = ${NAME}: holds the placeholder ${NAME}, which nothing replaces; write the value itself"
    ]),
    ({"engine_args": {"hf_token": "${TOKEN}"}}, [
        "engine_args.hf_token = (not shown): "
        "holds the placeholder ${TOKEN}, which nothing replaces; write the value itself"
    ]),
]  # fmt: skip


def test_the_batch_may_be_left_to_the_engine(root: Path, args: Args) -> None:
    """Without it the profiling pass measures it."""
    assert parse_args(changed(args, {"scheduler.options": {}}), root).engine_settings().policy_options == {
        "tbt_min_us": 50_000
    }


@pytest.mark.parametrize(("changes", "expected"), WRONG_VALUES, ids=[str(changes) for changes, _ in WRONG_VALUES])
def test_wrong_values(root: Path, args: Args, changes: dict[str, Any], expected: list[str]) -> None:
    """Each wrong value gives one error with its path, the value, and what to write; nothing else is reported."""
    assert errors(changed(args, changes), root) == expected


def test_vllm_arguments_are_checked_by_name(root: Path, args: Args) -> None:
    """An engine argument that vLLM does not have is found before vLLM is started."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert errors({**args, "engine_args": {"gpu_memory_utilisation": 0.5}}, root) == [
        "engine_args.gpu_memory_utilisation = 0.5: is not a known key. Did you mean gpu_memory_utilization?"
    ]


def test_a_wrong_rank_is_one_error(root: Path, args: Args) -> None:
    """An invalid max_lora_rank says nothing about adapters whose rank is above its default."""
    write_adapter(root / "adapters/strict", lora_tensors(rank=64), r=64)
    assert errors({**args, "max_lora_rank": 65}, root) == [
        "max_lora_rank = 65: has to be 1, 8, 16, 32, 64, 128, 256, 320 or 512"
    ]


def test_a_batch_above_the_step_is_noted(root: Path, args: Args) -> None:
    """The file works, but not as it reads."""
    args["scheduler"]["options"]["batch"] = 300
    assert parse_args(args, root).warnings == (
        "scheduler.options.batch is 300, above max_num_batched_tokens (256): no step computes more than 256 tokens, so "
        "that it acts like 256",
    )
    args["scheduler"]["options"]["batch"] = 256
    assert parse_args(args, root).warnings == ()


def test_keys_for_services_that_are_not_served_are_noted(root: Path, args: Args) -> None:
    """A key for a misspelled service would be refused at every request; the base model counts as a service."""
    for name, services in (("a", ["strict", "base-model"]), ("b", None), ("c", ["strikt", "relaxed", "old"])):
        add_key(root / "keys.jsonl", name, services)
    args["auth"] = {"keys_file": "keys.jsonl"}
    assert parse_args(args, root).warnings == (
        "the key c names old, strikt, which this file does not serve; see `halo keys list`, and make the key anew if "
        "that is a mistake",
    )


FileChange = Callable[[Path], object]
WRONG_FILES: list[tuple[str, dict[str, Any], FileChange, list[str]]] = [
    ("adapter directory missing", {"services.0.adapter": "adapters/none"}, lambda root: None, [
        "services[0].adapter = adapters/none: there is no such directory"
    ]),
    ("path too long", {"services.0.adapter": "a" * 300}, lambda root: None, [
        f"services[0].adapter = {'a' * 77}...: cannot be opened: File name too long"
    ]),
    ("null character", {"services.0.adapter": "a\0b"}, lambda root: None, [
        'services[0].adapter = "a\\0b": is not a path: it holds a null character'
    ]),
    ("home of nobody", {"services.0.adapter": "~no-such-user/a"}, lambda root: None, [
        "services[0].adapter = ~no-such-user/a: there is no such directory"
    ]),
    ("file for a directory", {"services.0.adapter": "model/config.json"}, lambda root: None, [
        "services[0].adapter = model/config.json: is not a directory"
    ]),
    ("adapter of another model", {}, lambda root: write_model(root / "model", hidden_size=128), [
        f"services[{index}].adapter = adapters/{name}: it was trained for another base model than model (hidden size "
        "128, 4 heads, 2 of them for keys and values): q_proj maps 64 to 64 features, there 128 to 128, "
        "v_proj maps 64 to 32 features, there 128 to 64"
        for index, name in enumerate(["strict", "relaxed"])
    ]),
    ("rank", {"max_lora_rank": 1}, lambda root: None, [
        f"services[{index}].adapter = adapters/{name}: its rank is 4, the engine is built for ranks up to 1 "
        "(max_lora_rank)"
        for index, name in enumerate(["strict", "relaxed"])
    ]),
    ("several faults of one adapter", {}, lambda root: write_adapter(
        root / "adapters/strict", use_dora=True, bias="all"), [
        "services[0].adapter = adapters/strict: use_dora is set: DoRA is not supported; "
        "train the adapter without it",
        "services[0].adapter = adapters/strict: bias is all; only none is supported",
    ]),
    ("context", {"max_model_len": 513}, lambda root: None, [
        "max_model_len = 513: is more than the model's own 512 tokens"
    ]),
    ("heads", {"tensor_parallel_size": 3}, lambda root: None, [
        "tensor_parallel_size = 3: does not divide the model's 4 attention heads"
    ]),
    ("key-value heads", {"tensor_parallel_size": 4}, lambda root: write_model(
        root / "model", num_key_value_heads=3, num_attention_heads=4, head_dim=16), [
        "tensor_parallel_size = 4: neither divides the model's 3 key-value heads nor is a multiple of them",
        "services[0].adapter = adapters/strict: it was trained for another base model than model (hidden size 64, "
        "4 heads, 3 of them for keys and values): v_proj maps 64 to 32 features, there 64 to 48",
        "services[1].adapter = adapters/relaxed: it was trained for another base model than model (hidden size 64, "
        "4 heads, 3 of them for keys and values): v_proj maps 64 to 32 features, there 64 to 48",
    ]),
    ("model without configuration", {}, lambda root: (root / "model/config.json").unlink(), [
        "model = model: config.json is missing"
    ]),
    ("null character in keys", {"auth": {"keys_file": "a\0b"}}, lambda root: None, [
        'auth.keys_file = "a\\0b": is not a path: it holds a null character'
    ]),
    ("keys", {"auth": {"keys_file": "keys.jsonl"}}, lambda root: None, [
        "auth.keys_file = keys.jsonl: there is no such file; `halo keys add` makes it"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "change_files", "expected"), [row[1:] for row in WRONG_FILES], ids=[row[0] for row in WRONG_FILES]
)
def test_wrong_files(
    root: Path, args: Args, changes: dict[str, Any], change_files: FileChange, expected: list[str]
) -> None:
    """What the files say is compared with the section before anything is started."""
    change_files(root)
    assert errors(changed(args, changes), root) == expected


def test_model_that_is_not_there(root: Path, args: Args) -> None:
    """A missing model directory is named in full; the hub is asked only when that is allowed."""
    args["model"] = "org/model"
    assert errors(args, root) == [
        f"model = org/model: there is no such directory. It was looked for at {root}/org/model; "
        "`make serve` prepares the default model"
    ]
    parsed = parse_args({**args, "allow_hub": True}, root)
    assert parsed.engine_settings().model == "org/model"
    assert parsed.warnings[0] == "model org/model is not a directory here; it will be looked up on the hub"


def test_local_directory_wins_over_the_hub(root: Path, args: Args) -> None:
    """With the hub allowed, a directory is still a directory."""
    assert parse_args({**args, "allow_hub": True}, root).engine_settings().model == str(root / "model")


def test_everything_at_once(root: Path, args: Args) -> None:
    """No error hides another: malformed values, values against each other and files come in one list."""
    wrong = changed(args, {"services.0.ttft": 0, "services.1.name": "strict", "services.1.adapter": "none"})
    wrong |= {"modle": "x", "replicas": 0, "tensor_parallel_size": 3}
    assert sorted(errors(wrong, root)) == [
        "modle = x: is not a known key. Did you mean model?",
        "replicas = 0: has to be greater than or equal to 1",
        "services[0].ttft = 0: must be longer than zero, with a unit, like 500ms or 0.5s",
        "services[1].adapter = none: there is no such directory",
        "services[1].name = strict: is the name of services[0] too; every service needs its own",
        "tensor_parallel_size = 3: does not divide the model's 4 attention heads",
    ]


def test_files_can_be_left_out(tmp_path: Path, args: Args) -> None:
    """Where the files are on another machine the section is checked alone."""
    parsed = parse_args(args, tmp_path, files=False)
    assert isinstance(parsed, AppArgs)
    assert parsed.adapter_reports == {}


@pytest.mark.parametrize("args", [None, [], "text", 5])
def test_not_a_section(tmp_path: Path, args: object) -> None:
    """Something else than keys and values is one error, not a crash."""
    (problem,) = errors(args, tmp_path)
    assert problem.endswith("has to be a section of keys and values")


def test_errors_survive_pickling(root: Path, args: Args) -> None:
    """Serve builds the application in another process and carries the error back by pickling it."""
    with pytest.raises(ConfigErrors) as caught:
        parse_args(changed(args, {"services.0.ttft": 0, "services.1.tbt": DELETE}), root)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
