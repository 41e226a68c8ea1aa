"""The whole cluster.yaml: Ray's sections as strictly as ours, every error with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from app.config import ConfigErrors, load_cluster
from deployments.auth import add_key
from tests.fakes.checkpoints import write_adapter, write_model

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"

Data = dict[str, Any]


@pytest.fixture
def data(args: dict[str, Any]) -> Data:
    """A correct file, to be changed by the test."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {"name": "halo", "route_prefix": "/", "import_path": "app.main:build_app", "args": args},
        ],
    }


def write(root: Path, text: str) -> Path:
    path = root / "cluster.yaml"
    path.write_text(text)
    return path


def errors(path: Path) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load_cluster(path)
    return [str(problem) for problem in caught.value.problems]


def without_lines(problems: list[str]) -> list[str]:
    return [problem.split(": ", 1)[1] if problem.startswith("line ") else problem for problem in problems]


WRONG_FILE = """\
proxy_location: Everywhere
http_option: {host: 127.0.0.1}
http_options: {host: 0.0.0.0, port: 99999}
logging_config:
  log_levl: INFO
applications:
  - name: halo
    route_prefix: halo
    import_path: app.main:build_app
    arg: {}
    args:
      model: model
      base: {name: base-model, ttft: 2s, tbt: 200ms}
      services:
        - name: strict
          adapter: adapters/none
          ttft: 0
          tbt: 50
        - name: strict
          adapter: adapters/relaxed
          ttft: ${TTFT}
          tbt: 0.2s
          tbt: 0.3s
      replica: 2
      max_replicas: 3
      scheduler: {options: {batch: 8}}
    deployments:
      - name: engin
      - name: engine
        max_ongoing_request: 5
        num_replicas: 2
        autoscaling_config: {max_ongoing_requests: 5}
        ray_actor_options: {num_gpus: -1}
        gates: 1
      - 7
"""


def test_every_error_at_once(root: Path) -> None:
    """Misspelled, misplaced, malformed and missing things of all sections come in one list, in the file's order."""
    assert errors(write(root, WRONG_FILE)) == [
        "line 1: proxy_location = Everywhere: has to be 'Disabled', 'HeadOnly' or 'EveryNode'",
        "line 2: http_option is not a known key. Did you mean http_options?",
        "line 3: http_options.port = 99999: has to be between 1 and 65535",
        "line 3: http_options.host = 0.0.0.0: opens the server to the network without API keys. "
        "Set args.auth.keys_file (see `halo keys add`), or write 127.0.0.1",
        "line 5: logging_config.log_levl = INFO: is not a known key. Did you mean log_level?",
        "line 8: applications[0].route_prefix = halo: has to start with / and, unless it is / alone, "
        "not to end with one",
        "line 10: applications[0].arg is not a known key. Did you mean args?",
        "line 16: applications[0].args.services[0].adapter = adapters/none: there is no such directory",
        "line 17: applications[0].args.services[0].ttft = 0: must be longer than zero, with a unit, like 500ms or 0.5s",
        "line 18: applications[0].args.services[0].tbt = 50: has no unit; "
        "write 50ms if milliseconds are meant, 50s if seconds",
        "line 19: applications[0].args.services[1].name = strict: is the name of services[0] too; "
        "every service needs its own",
        "line 21: applications[0].args.services[1].ttft = ${TTFT}: holds the placeholder ${TTFT}, "
        "which nothing replaces; write the value itself",
        "line 23: applications[0].args.services[1].tbt is written twice, first on line 22; keep one",
        "line 24: applications[0].args.replica = 2: is not a known key. Did you mean replicas?",
        "line 25: applications[0].args.max_replicas = 3: is not a known key. "
        "max_replicas is a key of applications[].deployments[].autoscaling_config",
        "line 28: applications[0].deployments[0].name = engin: is not a deployment of this application. "
        "Did you mean engine?",
        "line 29: applications[0].deployments[1] is refused: Manually setting num_replicas is not allowed when "
        "autoscaling_config is provided.",
        "line 30: applications[0].deployments[1].max_ongoing_request = 5: is not a known key. "
        "Did you mean max_ongoing_requests?",
        "line 31: applications[0].deployments[1].num_replicas = 2: is set in another place: write args.replicas",
        "line 32: applications[0].deployments[1].autoscaling_config.max_ongoing_requests = 5: is not a known key. "
        "max_ongoing_requests is a key of applications[].deployments[]",
        "line 33: applications[0].deployments[1].ray_actor_options.num_gpus = -1: has to be greater than or equal to 0",
        "line 34: applications[0].deployments[1].gates = 1: is not a known key. The keys here are "
        + ", ".join(sorted(DeploymentSchema.model_fields)),
        "line 35: applications[0].deployments[2] = 7: has to be a section of keys and values",
    ]


RAY_SECTIONS: list[tuple[str, Data, list[str]]] = [
    ("applications missing", {"applications": None}, ["applications = null: has to be a list"]),
    ("host missing", {"http_options": {"port": 8000}}, [
        "http_options.host is missing: Ray Serve would listen on all interfaces. "
        "Write host: 127.0.0.1, or 0.0.0.0 with auth.keys_file"
    ]),
    ("port not a number", {"http_options": {"host": "::1", "port": "eighty"}}, [
        "http_options.port = eighty: has to be a valid integer, unable to parse string as an integer"
    ]),
    ("certificate", {"http_options": {"host": "localhost", "ssl_keyfile": "none.pem", "ssl_certfile": "none.crt"}}, [
        "http_options.ssl_certfile = none.crt: is not a file",
        "http_options.ssl_keyfile = none.pem: is not a file",
    ]),
    ("section that is a list", {"logging_config": ["INFO"]}, [
        "logging_config has to be a section of keys and values"
    ]),
    ("controller", {"controller_options": {"runtime_env": {}, "num_cpus": 1}}, [
        "controller_options.num_cpus = 1: is not a known key. "
        "num_cpus is a key of applications[].deployments[].ray_actor_options"
    ]),
    ("grpc", {"grpc_options": {"prt": 1}}, ["grpc_options.prt = 1: is not a known key. Did you mean port?"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"), [row[1:] for row in RAY_SECTIONS], ids=[row[0] for row in RAY_SECTIONS]
)
def test_rays_sections(root: Path, data: Data, changes: Data, expected: list[str]) -> None:
    """What Ray would ignore, or find out only on start, is an error here."""
    assert without_lines(errors(write(root, yaml.safe_dump(data | changes)))) == expected


APPLICATION: list[tuple[str, Data, list[str]]] = [
    ("import path", {"import_path": "app.main:build_ap"}, [
        "applications[0].import_path = app.main:build_ap: does not name HALO's application; "
        "its import_path is app.main:build_app"
    ]),
    ("import path missing", {"import_path": None}, [
        "applications[0].import_path does not name HALO's application; its import_path is app.main:build_app",
    ]),
    ("runtime_env", {"runtime_env": {"env_var": {"A": "b"}}}, [
        "applications[0].runtime_env.env_var is not a known key. Did you mean env_vars?"
    ]),
    ("two admissions", {"deployments": [{"name": "admission", "num_replicas": 2}]}, [
        "applications[0].deployments[0].num_replicas cannot be set: admission is one actor, it orders all requests"
    ]),
    ("autoscaling", {"deployments": [
        {"name": "engine", "autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}]}, [
        "applications[0].deployments[0].autoscaling_config is refused: max_replicas (2) must be greater than or "
        "equal to min_replicas (3)!"
    ]),
    ("policy of autoscaling", {"deployments": [
        {"name": "engine", "autoscaling_config": {"policy": {"policy_function": "no.such:thing", "polcy": 1}}}]}, [
        "applications[0].deployments[0].autoscaling_config.policy.polcy = 1: is not a known key. "
        "The keys here are policy_function, policy_kwargs"
    ]),
    ("request router", {"deployments": [
        {"name": "engine", "request_router_config": {"request_router_class": "no.such:thing", "backof": 1}}]}, [
        "applications[0].deployments[0].request_router_config.backof = 1: is not a known key. "
        "Did you mean max_backoff_s?"
    ]),
    ("host in the application", {"host": "127.0.0.1"}, [
        'the file is refused: Host "127.0.0.1" is set in the config for application `halo`. Please remove it and '
        "set host in the top level deploy config only."
    ]),
    ("secret", {"runtime_env": {"env_vars": {"HF_TOKEN": "${TOKEN}"}}}, [
        "applications[0].runtime_env.env_vars.HF_TOKEN = (not shown): holds the placeholder ${TOKEN}, "
        "which nothing replaces; write the value itself"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), [row[1:] for row in APPLICATION], ids=[row[0] for row in APPLICATION])
def test_application_section(root: Path, data: Data, changes: Data, expected: list[str]) -> None:
    """The application's own keys and the overrides of its deployments, down to the innermost section."""
    data["applications"][0].update(changes)
    data["applications"][0] = {key: value for key, value in data["applications"][0].items() if value is not None}
    problems = without_lines(errors(write(root, yaml.safe_dump(data))))
    assert [problem for problem in problems if problem != "applications[0].import_path is missing"] == expected


def test_one_application_of_ours(root: Path, data: Data) -> None:
    """Other applications may stand beside ours; a second one of ours may not."""
    other = {"name": "other", "route_prefix": "/other", "import_path": "hospital.portal:app", "args": {"any": "thing"}}
    data["applications"].insert(0, other)
    assert load_cluster(write(root, yaml.safe_dump(data))).application == 1
    data["applications"].append({**data["applications"][1], "name": "again", "route_prefix": "/again"})
    assert without_lines(errors(write(root, yaml.safe_dump(data)))) == [
        "applications[2] is a second application with import_path app.main:build_app; one file serves one base model"
    ]


def test_keys_open_the_network(root: Path, data: Data) -> None:
    """With a key file the server may listen on every interface."""
    add_key(root / "keys.jsonl", "ward-3", None)
    data["http_options"]["host"] = "0.0.0.0"
    data["applications"][0]["args"]["auth"] = {"keys_file": "keys.jsonl"}
    cluster = load_cluster(write(root, yaml.safe_dump(data)))
    assert cluster.address == ("0.0.0.0", 8000)
    assert cluster.args.gateway_settings().auth.keys_file == root / "keys.jsonl"


def test_unreadable_files(root: Path) -> None:
    """No file, an empty one and one that holds a list are one error each."""
    assert errors(root / "none.yaml") == ["the file cannot be read: No such file or directory"]
    assert errors(write(root, "")) == ["line 1: the file is empty"]
    assert errors(write(root, "- a\n")) == [
        "line 1: the file has to be a mapping, starting with keys like applications:"
    ]


def test_args_missing(root: Path, data: Data) -> None:
    """An application without args serves nothing, and that is said at its line."""
    del data["applications"][0]["args"]
    assert without_lines(errors(write(root, yaml.safe_dump(data)))) == [
        "applications[0].args is missing: it says what is served"
    ]


def test_round_trip(root: Path, data: Data) -> None:
    """A dumped configuration loads to an equal one."""
    first = load_cluster(write(root, yaml.safe_dump(data)))
    second = load_cluster(write(root, yaml.safe_dump(first.dump())))
    assert second.dump() == first.dump()
    assert second.args.engine_settings() == first.args.engine_settings()


def test_derived_file(root: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A benchmark's variant may be anywhere: sections are overlaid, paths become absolute, and it is checked."""
    data["applications"][0]["args"]["scheduler"] = {"policy": "halo-paper", "options": {"batch": 4}}
    cluster = load_cluster(write(root, yaml.safe_dump(data)))
    path = tmp_path_factory.mktemp("elsewhere") / "deep" / "variant.yaml"
    variant = cluster.derive(path, {"scheduler": {"options": {"batch": 8}}, "max_num_seqs": 9}, port=8123)
    assert variant.address == ("127.0.0.1", 8123)
    assert (variant.args.max_num_seqs, variant.args.scheduler.options) == (9, {"batch": 8})
    assert variant.args.service_settings() == cluster.args.service_settings()
    assert variant.args.engine_settings().model == str(root / "model")
    with pytest.raises(ConfigErrors, match="replicas = 0: has to be greater than or equal to 1"):
        cluster.derive(path, {"replicas": 0})


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """The repository's cluster.yaml beside a model and adapters of the right names."""
    write_model(tmp_path / ".cache/models/smollm2-135m-instruct", max_position_embeddings=8192)
    data = yaml.safe_load(SHIPPED.read_text())
    for service in data["applications"][0]["args"]["services"]:
        write_adapter(tmp_path / service["adapter"], base_model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct")
    return write(tmp_path, SHIPPED.read_text())


def test_shipped_file(shipped: Path) -> None:
    """The shipped file is correct, for us and for Ray, and keeps the paper's targets times its one factor."""
    ServeDeploySchema.model_validate(yaml.safe_load(shipped.read_text()))
    cluster = load_cluster(shipped)
    scale = cluster.args.slo_scale
    promises = {s.name: (s.ttft_us / scale, s.tbt_us / scale) for s in cluster.args.service_settings()}
    assert promises == {  # HALO, Table 1: TTFT and TBT-1.
        "intelligent-triage": (2_000_000, 200_000),
        "pre-assessment": (2_000_000, 100_000),
        "analysis-assistant": (1_000_000, 50_000),
        "record-generation": (1_000_000, 50_000),
    }
    assert cluster.address == ("127.0.0.1", 8000)
    assert cluster.args.engine_settings().max_loras == 4
    assert cluster.args.warnings == ()
