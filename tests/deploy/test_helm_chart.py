"""The Helm chart: rendered by the real `helm` with several settings, held against the schemas of the Kubernetes API.

No cluster runs here: what is shown is that the manifests are valid, safe, and consistent with the services' settings.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from pydantic_settings import BaseSettings

from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.service_token import OPEN_PATHS
from shared.settings import env_name

CHART = Path(__file__).parents[2] / "deploy/helm/diptych"
HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm: python tests/deploy/get_helm.py .venv/bin")

Object = dict[str, Any]
API_VERSIONS = ("1.30", "1.37")
OF_OPERATORS = {"ScaledObject", "ServiceMonitor", "Certificate"}  # their schemas are not the API server's

SETTINGS_OF: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "vision-encoder": VisionEncoderSettings,
    "text-engine": TextEngineSettings,
}

EVERYTHING: Object = {
    "model": "llava-hf/llava-1.5-7b-hf",
    "images": {"prefix": "registry.example.com/team/", "tag": "1.2.3", "pullSecrets": ["registry"]},
    "huggingFaceToken": {"secretName": "hub"},
    "serviceToken": {"secretName": "between"},
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerName": "internal"}},
    "modelCache": {"existingClaim": "checkpoints"},
    "gateway": {
        "apiKeys": {"secretName": "keys"},
        "front": {"tlsSecretName": "front", "clientAuthority": True},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecretName": "tls"},
        "autoscaling": {"enabled": True},
        "env": {"DIPTYCH_GATEWAY_MAX_REQUESTS_PER_MINUTE": 600, "DIPTYCH_GATEWAY_REPLICA_WAIT_S": 120},
    },
    "visionEncoder": {"gpus": 1, "autoscaling": {"enabled": True, "minReplicas": 0}},
    "textEngine": {
        "gpus": 2,
        "autoscaling": {"enabled": True},
        "env": {"DIPTYCH_ENGINE_TENSOR_PARALLEL_SIZE": 2},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "podAnnotations": {"team": "vision"},
    },
    "prometheus": {"serviceMonitors": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
SETTINGS: dict[str, Object] = {
    "as it comes": {},
    "everything on": EVERYTHING,
    "a Redis of one's own": {"redis": {"enabled": False, "external": {"secretName": "cache"}}},
    "TLS between services": {"tls": {"enabled": True, "secretNames": {"textEngine": "of-engines"}}},
    "TLS in front only": {"gateway": {"front": {"tlsSecretName": "front"}, "service": {"port": 443}}},
    "no cache at all": {"redis": {"enabled": False}},
    "closed to the internet": {"networkPolicy": {"egressToInternet": False}},
    "no network policies": {"networkPolicy": {"enabled": False}},
    "text only": {"model": "smollm2", "visionEncoder": {"replicas": 0}},
}


def helm(*arguments: str, values: Object, folder: Path) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    return subprocess.run([HELM, *arguments, "--values", file], capture_output=True, text=True, check=False, timeout=60)


def render(values: Object, folder: Path, release: str = "diptych") -> list[Object]:
    done = helm("template", release, str(CHART), "--namespace", "serving", values=values, folder=folder)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@pytest.fixture(params=SETTINGS, ids=lambda name: name.replace(" ", "-"))
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Object]:
    return render(SETTINGS[request.param], tmp_path)


def of_kind(manifests: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pods(manifests: list[Object]) -> Iterator[Object]:
    yield from (each["spec"]["template"]["spec"] for each in of_kind(manifests, "Deployment").values())
    yield from (each["spec"] for each in of_kind(manifests, "Pod").values())


def labels(manifests: list[Object]) -> list[dict[str, str]]:
    return [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(manifests, "Deployment").values()]


# --- valid ------------------------------------------------------------------------------------------------------------


def test_the_chart_passes_helms_own_check(tmp_path: Path) -> None:
    done = helm("lint", "--strict", str(CHART), values=EVERYTHING, folder=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", API_VERSIONS)
def test_every_object_fits_the_schema_of_the_kubernetes_api(manifests: list[Object], version: str) -> None:
    for each in manifests:
        if each["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(each, version, strict=True)


def test_no_two_objects_of_a_kind_share_a_name(manifests: list[Object]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(names) == len(set(names))


def test_a_release_of_another_name_is_told_apart(tmp_path: Path) -> None:
    ours, theirs = render({}, tmp_path), render({}, tmp_path, release="blue")
    assert not {each["metadata"]["name"] for each in ours} & {each["metadata"]["name"] for each in theirs}
    assert not [chosen for chosen in labels(ours) if chosen in labels(theirs)]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modle": "demo"}, "modle"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"textEngine": {"replicas": "two"}}, "replicas"),
        ({"textEngine": {"autoscaling": {"minReplicas": 0}}}, "minReplicas"),
        ({"images": {"prefix": "registry.example.com/team"}}, "prefix"),
        ({"gateway": {"env": {"max-body-bytes": 1}}}, "max-body-bytes"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.host"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "tls.certManager.issuerName"),
        ({"tls": {"certManager": {"issuerKind": "Vault"}}}, "issuerKind"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(values: Object, named: str, tmp_path: Path) -> None:
    done = helm("template", "diptych", str(CHART), values=values, folder=tmp_path)
    assert done.returncode != 0
    assert named in done.stderr


# --- safe -------------------------------------------------------------------------------------------------------------


def test_no_pod_runs_as_root_writes_to_its_image_or_holds_a_token(manifests: list[Object]) -> None:
    for pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_secrets_are_named_and_never_written_out(tmp_path: Path) -> None:
    manifests = render(EVERYTHING, tmp_path)
    assert not of_kind(manifests, "Secret")
    named = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["name"]
        for pod in pods(manifests)
        for container in pod["containers"]
        for variable in container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert named == {"DIPTYCH_GATEWAY_API_KEYS": "keys", "HF_TOKEN": "hub", "DIPTYCH_SERVICE_TOKEN": "between"}
    gateway = of_kind(manifests, "Deployment")["diptych-gateway"]
    assert "HF_TOKEN" not in json.dumps(gateway)


def test_only_the_gateway_can_be_reached_from_outside_the_release(tmp_path: Path) -> None:
    policies = of_kind(render({}, tmp_path), "NetworkPolicy")
    assert set(policies) == {f"diptych-{name}" for name in ("gateway", "vision-encoder", "text-engine", "redis")}
    for name, policy in policies.items():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        [rule] = policy["spec"]["ingress"]
        open_to_all = "from" not in rule
        assert open_to_all == (name == "diptych-gateway")


def test_closed_to_the_internet_nothing_may_leave_the_release_but_questions_for_names(tmp_path: Path) -> None:
    for policy in of_kind(render(SETTINGS["closed to the internet"], tmp_path), "NetworkPolicy").values():
        for rule in policy["spec"]["egress"]:
            names_only = {each["port"] for each in rule["ports"]} == {53}
            assert names_only or all("podSelector" in peer for peer in rule["to"])


def test_every_policy_and_budget_speaks_of_pods_that_exist(manifests: list[Object]) -> None:
    def match(selector: Object) -> bool:
        wanted = selector["matchLabels"].items()
        return any(wanted <= chosen.items() for chosen in labels(manifests))

    for kind, field in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        for each in of_kind(manifests, kind).values():
            assert match(each["spec"][field])
    for policy in of_kind(manifests, "NetworkPolicy").values():
        for rule in policy["spec"]["ingress"] + policy["spec"].get("egress", []):
            for peer in rule.get("from", []) + rule.get("to", []):
                assert "podSelector" not in peer or match(peer["podSelector"])


# --- consistent -------------------------------------------------------------------------------------------------------


def test_every_variable_that_the_chart_sets_is_a_setting_of_that_service(tmp_path: Path) -> None:
    for pod in pods(render(EVERYTHING, tmp_path)):
        for container in pod["containers"]:
            known = {"MODEL", "HF_TOKEN", "POD_IP"}
            if settings := SETTINGS_OF.get(container["name"]):
                known |= {env_name(settings, name) for name in settings.model_fields}
            assert {variable["name"] for variable in container.get("env", [])} <= known


def test_gateway_and_panels_get_the_service_token_from_one_secret_and_nobody_else_gets_it(tmp_path: Path) -> None:
    secrets = {
        container["name"]: variable["valueFrom"]["secretKeyRef"]
        for pod in pods(render(EVERYTHING, tmp_path))
        for container in pod["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "DIPTYCH_SERVICE_TOKEN"
    }
    assert set(secrets) == {"gateway", "vision-encoder", "text-engine"}
    assert all(secret == {"name": "between", "key": "token"} for secret in secrets.values())


def test_the_gateway_looks_for_the_panels_where_their_services_are(manifests: list[Object]) -> None:
    services = of_kind(manifests, "Service")
    [container] = of_kind(manifests, "Deployment")["diptych-gateway"]["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    for variable in ("DIPTYCH_GATEWAY_VISION_ENCODERS", "DIPTYCH_GATEWAY_TEXT_ENGINES"):
        address = re.fullmatch(r"dns(?:\+https)?://([a-z-]+):(\d+)", values[variable])
        assert address is not None
        service = services[address[1]]["spec"]
        assert service["clusterIP"] == "None"
        assert [port["port"] for port in service["ports"]] == [int(address[2])]
    if redis := values.get("REDIS_URL"):
        address = urlsplit(redis)
        assert [each["port"] for each in services[address.hostname]["spec"]["ports"]] == [address.port]


# --- TLS --------------------------------------------------------------------------------------------------------------


def containers(manifests: list[Object]) -> dict[str, Object]:
    """Of the services' deployments, by their component."""
    return {
        name.removeprefix("diptych-"): each["spec"]["template"]["spec"]["containers"][0]
        for name, each in of_kind(manifests, "Deployment").items()
    }


def variables(container: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def test_without_tls_nothing_of_it_is_rendered(tmp_path: Path) -> None:
    assert "tls" not in json.dumps(render({}, tmp_path)).lower()


@pytest.mark.parametrize("name", ["everything on", "TLS between services", "TLS in front only"])
def test_every_file_that_a_variable_names_comes_from_a_secret_that_is_mounted_read_only(
    name: str, tmp_path: Path
) -> None:
    for deployment in of_kind(render(SETTINGS[name], tmp_path), "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
        [container] = pod["containers"]
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        values = variables(container)
        files = [value for variable, value in values.items() if variable.endswith("_FILE")]
        if container["name"] == "redis":
            files = [word for word in container["args"] if word.startswith("/tls/")]
        else:
            cert, key = values.get("DIPTYCH_TLS_CERT_FILE"), values.get("DIPTYCH_TLS_KEY_FILE")
            assert (cert is None) == (key is None) == ("/tls" not in mounts)
        for file in files:
            mount = mounts[str(Path(file).parent)]
            assert mount["readOnly"] is True
            assert secrets[mount["name"]]["defaultMode"] == 0o440
            assert Path(file).name in ("tls.crt", "tls.key", "ca.crt")


def test_over_tls_everybody_connects_to_a_name_that_the_other_ones_certificate_holds(tmp_path: Path) -> None:
    manifests = render(EVERYTHING, tmp_path)
    certificates = of_kind(manifests, "Certificate")
    of = {name: variables(container) for name, container in containers(manifests).items()}
    for variable in ("DIPTYCH_GATEWAY_VISION_ENCODERS", "DIPTYCH_GATEWAY_TEXT_ENGINES"):
        address = urlsplit(of["gateway"][variable])
        assert address.scheme == "dns+https"
        assert address.hostname in certificates[str(address.hostname)]["spec"]["dnsNames"]
    assert of["vision-encoder"]["DIPTYCH_ENCODER_PUBLIC_URL"] == "https://$(POD_IP):8001"
    assert of["text-engine"]["DIPTYCH_TLS_SERVER_NAME"] in certificates["diptych-vision-encoder"]["spec"]["dnsNames"]
    for values in (of["gateway"], of["vision-encoder"], of["text-engine"]):
        redis = urlsplit(values["REDIS_URL"])
        assert redis.scheme == "rediss"
        assert redis.hostname in certificates["diptych-redis"]["spec"]["dnsNames"]


def test_cert_manager_fills_the_secrets_that_pods_mount_with_certificates_for_both_directions(tmp_path: Path) -> None:
    manifests = render(EVERYTHING, tmp_path)
    made = {name: each["spec"] for name, each in of_kind(manifests, "Certificate").items()}
    mounted = {
        name: volume["secret"]["secretName"]
        for name, each in of_kind(manifests, "Deployment").items()
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert {name: spec["secretName"] for name, spec in made.items()} == mounted
    assert set(mounted) == {f"diptych-{name}" for name in ("gateway", "vision-encoder", "text-engine", "redis")}
    for spec in made.values():
        assert spec["usages"] == ["server auth", "client auth"]
        assert spec["issuerRef"]["name"] == "internal"


def test_probes_speak_as_the_port_does_and_panels_want_certificates_from_all_others(tmp_path: Path) -> None:
    for settings, between, in_front in (
        ({}, "HTTP", "HTTP"),
        (SETTINGS["TLS between services"], "HTTPS", "HTTP"),
        (SETTINGS["TLS in front only"], "HTTP", "HTTPS"),
    ):
        for name, container in containers(render(settings, tmp_path)).items():
            if name == "redis":
                continue
            expected = in_front if name == "gateway" else between
            probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
            assert {probe["scheme"] for probe in probes} == {expected}
            # The kubelet shows no certificate: what it asks for has to be open to all.
            assert {probe["path"] for probe in probes} <= OPEN_PATHS
            if name != "gateway":
                wanted = variables(container).get("DIPTYCH_TLS_REQUIRE_CLIENT_CERT")
                assert wanted == ("true" if between == "HTTPS" else None)


def test_over_tls_redis_has_no_port_without_it_and_is_probed_with_its_own_certificate(tmp_path: Path) -> None:
    redis = containers(render(SETTINGS["TLS between services"], tmp_path))["redis"]
    arguments = dict(zip(redis["args"][1::2], redis["args"][2::2], strict=True))
    assert (arguments["--port"], arguments["--tls-port"], arguments["--tls-auth-clients"]) == ("0", "6379", "yes")
    assert redis["readinessProbe"]["exec"]["command"][:2] == ["redis-cli", "--tls"]


def test_prometheus_reads_panels_by_tls_and_checks_who_they_are(tmp_path: Path) -> None:
    manifests = render(EVERYTHING, tmp_path)
    for name in ("diptych-vision-encoder", "diptych-text-engine"):
        [endpoint] = of_kind(manifests, "ServiceMonitor")[name]["spec"]["endpoints"]
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == name
        assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": f"{name}-tls", "key": "ca.crt"}


# --- replacing and scaling --------------------------------------------------------------------------------------------


def test_a_pod_is_given_longer_to_stop_than_its_answers_may_take(tmp_path: Path) -> None:
    for pod in pods(render({"drainSeconds": 90}, tmp_path)):
        if "terminationGracePeriodSeconds" in pod:
            assert pod["terminationGracePeriodSeconds"] > 90 + 5  # and what it goes on accepting before


def test_a_replica_is_replaced_only_when_the_new_one_is_ready(manifests: list[Object]) -> None:
    for name, deployment in of_kind(manifests, "Deployment").items():
        if name != "diptych-redis":
            assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
            [container] = deployment["spec"]["template"]["spec"]["containers"]
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()


def test_each_panel_scales_by_a_signal_of_its_own_and_sets_no_replicas_beside_it(tmp_path: Path) -> None:
    manifests = render(EVERYTHING, tmp_path)
    queries = {
        name: [trigger["metadata"]["query"] for trigger in each["spec"]["triggers"]]
        for name, each in of_kind(manifests, "ScaledObject").items()
    }
    assert set(queries) == {"diptych-vision-encoder", "diptych-text-engine"}
    assert "encoder_queued_images" in queries["diptych-vision-encoder"][0]
    assert "kv_cache_usage_perc" in queries["diptych-text-engine"][1]
    assert all('namespace="serving"' in query for each in queries.values() for query in each)
    for name in ("diptych-gateway", "diptych-vision-encoder", "diptych-text-engine"):
        assert "replicas" not in of_kind(manifests, "Deployment")[name]["spec"]


def test_gpus_are_asked_for_where_they_are_wanted(tmp_path: Path) -> None:
    deployments = of_kind(render(EVERYTHING, tmp_path), "Deployment")
    for name, gpus in (("vision-encoder", 1), ("text-engine", 2)):
        [container] = deployments[f"diptych-{name}"]["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus


# --- no value is dead -------------------------------------------------------------------------------------------------


def leaves(values: Object, path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def look_up(values: Object, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def put(values: Object, path: str, value: Any) -> Object:
    """A copy with one value exchanged."""
    first, _, rest = path.partition(".")
    return {**values, first: put(values.get(first, {}), rest, value) if rest else value}


DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())
# Another value of the same kind, where adding to it or turning it round would not be one.
ANOTHER = {
    "pullPolicy": "Always",
    "prefix": "other/",
    "pullSecrets": ["other"],
    "type": "NodePort",
    "maxMemory": "7mb",
    "issuerKind": "ClusterIssuer",
    "duration": "100h",
    "renewBefore": "10h",
    "targetKvCacheUsage": 0.5,
    "tolerations": [{"key": "other"}],
    "metricsFrom": [{"podSelector": {}}],
}
# What has to be otherwise before a value can matter.
BEFORE: dict[str, Object] = {
    "gateway.replicas": {"gateway.autoscaling.enabled": False},
    "visionEncoder.replicas": {"visionEncoder.autoscaling.enabled": False},
    "textEngine.replicas": {"textEngine.autoscaling.enabled": False},
    "modelCache.sizeLimit": {"modelCache.existingClaim": ""},
    "redis.external.secretName": {"redis.enabled": False},
    "redis.external.key": {"redis.enabled": False, "redis.external.secretName": "cache"},
}


@pytest.mark.parametrize("path", list(leaves(DEFAULTS)))
def test_every_value_has_an_effect(path: str, tmp_path: Path) -> None:
    before = EVERYTHING
    for other_path, value in BEFORE.get(path, {}).items():
        before = put(before, other_path, value)
    try:
        current = look_up(before, path)
    except KeyError:
        current = look_up(DEFAULTS, path)
    match current:
        case bool():
            other: Any = not current
        case int():
            other = current + 1
        case dict():
            other = {"OTHER": "x"}
        case _:
            other = ANOTHER.get(path.rpartition(".")[2], f"{current}2")
    assert render(put(before, path, other), tmp_path) != render(before, tmp_path)
