"""One question about a picture is one trace through every process; where nobody asked for traces there is nothing."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.conftest import CheckpointFactory
from tests.e2e.system import IMAGE_ROWS, System, picture, running_system, user
from tests.gateway_stack import eventually

pytestmark = pytest.mark.slow

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SERVICES = ("diptych-gateway", "diptych-vision-encoder", "diptych-text-engine")


class Collector:
    """An OTLP receiver: every span that came, with its service's name as `service`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    {
                        "service": service,
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "start": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "attributes": attributes(span.attributes),
                        "is_error": span.status.code == 2,
                    }
                    for span in scope.spans
                ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def system(
    checkpoint: CheckpointFactory, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with running_system(checkpoint("llava_clip_llama"), tmp_path_factory.mktemp("logs"), **asked) as running:
        yield running


def trace_of(collector: Collector, trace_id: str, *, of_services: int) -> list[dict[str, Any]]:
    """The trace, as soon as every service's own span of it has come: it ends last."""

    def spans() -> list[dict[str, Any]]:
        return [span for span in list(collector.spans) if span["trace"] == trace_id]

    def is_whole() -> bool:
        ended = {span["service"] for span in spans() if "http.request.method" in span["attributes"]}
        return len(ended) == of_services

    eventually(is_whole, within_s=20)
    return spans()


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_about_a_picture_is_one_connected_trace(system: System, collector: Collector, stream: bool):
    trace_id = f"{TRACE_ID[:-1]}{int(stream)}"
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    ask = system.stream if stream else system.ask
    answer = ask(user("What is it?", picture()), extra_headers=headers)
    spans = trace_of(collector, trace_id, of_services=3)

    by_id = {span["id"]: span for span in spans}
    [root] = [span for span in spans if span["parent"] == PARENT_ID]
    assert root["service"] == "diptych-gateway"
    for span in spans:
        assert span is root or span["parent"] in by_id, f"{span['name']} hangs in the air"
        assert span["start"] <= span["end"]
    names = {service: {span["name"] for span in spans if span["service"] == service} for service in SERVICES}
    assert names["diptych-gateway"] >= {"chat tiny", "fetch", "receive"}
    assert names["diptych-vision-encoder"] >= {"POST /v1/encode", "decode", "preprocess", "encode", "store"}
    assert names["diptych-text-engine"] >= {"generate tiny", "tokenize", "queue", "prefill", "decode_tokens"}

    usage = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "diptych",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": answer.usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer.usage["completion_tokens"],
        "diptych.usage.image_tokens": IMAGE_ROWS,
        "diptych.num_images": 1,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert usage.items() <= root["attributes"].items()
    assert 0 < root["attributes"]["gen_ai.latency.time_to_first_token"] < (root["end"] - root["start"]) / 1e9
    slack_ns = 50_000_000  # stages are placed by the wall clock, spans of two processes by two of them
    for span in spans:
        assert root["start"] - slack_ns <= span["start"]
        assert span["end"] <= root["end"] + slack_ns


def test_what_was_asked_is_in_no_span(system: System, collector: Collector):
    secret = "nobody-may-see-this"
    trace_id = TRACE_ID[::-1]
    system.ask(user(secret, picture()), extra_headers={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
    spans = trace_of(collector, trace_id, of_services=3)
    assert secret not in repr(spans)
    assert "base64" not in repr(spans)


def test_a_failed_request_is_one_in_its_trace_and_a_clients_mistake_is_none(system: System, collector: Collector):
    for number, (body, status) in enumerate([({"messages": []}, 400), ({"messages": "x"}, 400)]):
        trace_id = f"{number:032x}".replace("0", "e")
        headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
        assert system.gateway.http.post("/v1/chat/completions", json=body, headers=headers).status_code == status
        [root] = trace_of(collector, trace_id, of_services=1)
        assert root["attributes"]["error.type"]
        assert not root["is_error"]


def test_probes_and_scrapes_make_no_traces(system: System, collector: Collector):
    for service in system.services:
        service.http.get("/metrics")
        service.http.get("/ready")
    system.engine.http.get("/v1/model")
    system.ask(user("Good morning"))
    eventually(lambda: any(span["name"] == "chat tiny" for span in list(collector.spans)))
    assert {span["name"] for span in collector.spans if "/" in span["name"]} <= {
        "POST /v1/encode",
        "POST /v1/chat/completions",
    }


def test_log_lines_name_their_trace(system: System):
    trace_id = "c" * 32
    system.ask(user("Good morning"), extra_headers={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
    eventually(lambda: f'"trace_id": "{trace_id}"' in system.gateway.log)


def test_a_collector_that_is_gone_costs_no_answer(system: System, collector: Collector):
    """Last of these: nothing is collected afterwards."""
    collector.close()
    system.assert_serves()
    with httpx.Client(trust_env=False) as http:
        assert http.get(f"{system.gateway.url}/ready").status_code == 200


# --- off -------------------------------------------------------------------------------------------------------------

UNASKED = """
import sys
from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
create_app(GatewaySettings())
# Redis' client imports a part of it for purposes of its own, where it is installed.
ours = ("shared.otel", "opentelemetry.sdk.trace", "opentelemetry.exporter")
loaded = [name for name in sys.modules if name.startswith(ours)]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_unasked_what_traces_is_not_even_imported(env: dict[str, str]):
    done = subprocess.run([sys.executable, "-c", UNASKED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_protocol_that_is_not_spoken_stops_the_start():
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    done = subprocess.run([sys.executable, "-c", UNASKED], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'" in done.stderr
