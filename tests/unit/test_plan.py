"""Plans: more traffic never takes fewer replicas, the simulated cluster keeps its targets, costs are found again."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych import cli
from diptych.errors import BadSetting, CommandFailed
from diptych.planner.fit import Timed, fit_step, non_negative
from diptych.planner.hardware import load
from diptych.planner.measure import measure
from diptych.planner.part import MAX_REPLICAS, Part
from diptych.planner.plan import Plan, Planner
from diptych.planner.start import compose_command, helm_command
from diptych.planner.traffic import Target, Traffic
from diptych.simulator.costs import PRESETS
from tests.checkpoints import write_checkpoint
from tests.real_stack import real_stack

ROOT = Path(__file__).resolve().parents[2]
CPU = load("cpu")
TARGET = Target(ttft_s=1.0, gap_s=0.2)
CHAT = Traffic(requests_per_s=3.0, prompt_tokens=120, output_tokens=20, pictures=0.3, new_pictures=0.5)


def planned(traffic: Traffic, target: Target = TARGET) -> Plan:
    return Planner(CPU, target).plan(traffic)


def test_more_traffic_never_takes_fewer_replicas_and_every_plan_keeps_its_targets():
    planner = Planner(CPU, TARGET)
    plans = [planner.plan(replace(CHAT, requests_per_s=rate)) for rate in (0.7, 3.0, 17.0, 41.0, 97.0)]
    for plan in plans:
        assert planner.keeps(plan.figures)
        assert plan.figures["num_refused"] == 0
    for less, more in itertools.pairwise(plans):
        assert all(a <= b for a, b in zip(less.replicas, more.replicas, strict=True))
    assert plans[-1].engines > 3 * plans[0].engines


def test_more_pictures_take_encoders_and_longer_answers_take_engines():
    base = replace(CHAT, requests_per_s=30.0)
    usual = planned(base)
    assert planned(replace(base, pictures=1.0, new_pictures=1.0)).encoders > usual.encoders
    longer = planned(replace(base, output_tokens=60))
    assert (longer.encoders, longer.engines > usual.engines) == (usual.encoders, True)


def test_text_alone_needs_no_encoder():
    plan = planned(replace(CHAT, pictures=0.0))
    assert (plan.encoders, plan.redis_bytes) == (0, 0)


def test_redis_is_as_large_as_the_new_pictures_of_the_time_that_it_should_remember():
    plan = Planner(CPU, TARGET).plan(CHAT, keep_pictures_s=100.0)
    assert plan.redis_bytes == pytest.approx(3.0 * 0.3 * 0.5 * 100 * 196 * 576 * 2)


@given(engines=st.integers(1, 200_000), encoders=st.integers(0, 200_000))
@settings(max_examples=300)
def test_a_part_has_the_proportion_of_the_whole_and_a_size_that_can_be_simulated(engines: int, encoders: int):
    part = Part.of(engines, encoders)
    assert 1 <= part.engines <= min(engines, 2 * MAX_REPLICAS)
    assert (part.encoders > 0) == (encoders > 0)
    assert part.encoders <= encoders
    if max(engines, encoders) <= MAX_REPLICAS:
        assert (part.engines, part.encoders) == (engines, encoders)
    if encoders * 2 * MAX_REPLICAS >= engines:  # else even one is more than the part's share
        assert abs(part.encoders * engines - part.engines * encoders) <= max(engines, encoders), "off by one replica"
    assert part.requests_per_s(7.0 * engines) == pytest.approx(7.0 * part.engines)


def test_a_part_of_a_cluster_answers_as_the_whole_does(monkeypatch: pytest.MonkeyPatch):
    planner, engines, encoders = Planner(CPU, TARGET), 24, 8
    traffic = replace(CHAT, requests_per_s=0.8 * engines * planner.capacity(CHAT))
    whole = planner.simulate(traffic, engines, encoders)
    monkeypatch.setattr("diptych.planner.part.MAX_REPLICAS", 9)
    part = Part.of(engines, encoders)
    assert (part.engines, part.encoders) == (9, 3)
    share = replace(traffic, requests_per_s=part.requests_per_s(traffic.requests_per_s))
    seen = part.of_whole(planner.simulate(share, part.engines, part.encoders))
    for name in ("ttft_p50_s", "ttft_p95_s", "gap_p50_ms", "gap_p95_ms", "output_tokens_per_s", "encoders_busy"):
        assert seen[name] == pytest.approx(whole[name], rel=0.2), name


def test_the_largest_traffic_is_planned_with_a_part_of_its_cluster_and_says_what_it_is_at():
    said: list[str] = []
    plan = Planner(CPU, TARGET, say=said.append).plan(replace(CHAT, requests_per_s=100_000.0))
    assert plan.engines > 1000
    assert plan.encoders > 1000
    assert plan.figures["num_requests"] <= 2 * MAX_REPLICAS * 200
    assert plan.figures["output_tokens_per_s"] == pytest.approx(100_000 * CHAT.output_tokens, rel=0.2)
    assert said[-1] == f"simulating the cluster: engines {plan.engines}, encoders {plan.encoders}"


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (Target(ttft_s=0.01, gap_s=0.2), "no number of replicas gives a first token within 0.01 s"),
        (Target(ttft_s=1.0, gap_s=0.005), "no number of replicas keeps gaps within 5 ms"),
    ],
)
def test_what_no_number_of_replicas_can_keep_is_said_with_what_a_request_takes_alone(target: Target, complaint: str):
    with pytest.raises(CommandFailed, match=complaint):
        planned(CHAT, target)


def test_a_request_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(CommandFailed, match=r"has 3\d{3} tokens .* takes 2048"):
        planned(replace(CHAT, prompt_tokens=3000))


def test_another_rate_gives_the_same_requests_closer_together():
    slow, fast = (
        list(replace(CHAT, requests_per_s=rate).trace(num_requests=50, image_tokens=196, max_model_len=2048))
        for rate in (1.0, 10.0)
    )
    assert [c.turns for c in slow] == [c.turns for c in fast]
    assert [c.arrival_s for c in fast] == pytest.approx([c.arrival_s / 10 for c in slow])


def test_costs_are_found_again_in_the_times_that_they_make():
    cpu = PRESETS["cpu"]
    timed = [
        Timed(
            seconds=cpu.step_s + n * cpu.prompt_token_s + n * (n // 2) * cpu.attention_pair_s,
            num_steps=1,
            num_prompt_tokens=n,
            num_pairs=n * (n // 2),
        )
        for n in (32, 128, 256, 512)
    ]
    timed += [
        Timed(seconds=cpu.decode_step_s(n, c), num_steps=1, num_sequences=n, num_context_tokens=n * c)
        for n, c in ((1, 32), (4, 32), (16, 32), (8, 256), (4, 768))
    ]
    for name, found in fit_step(timed).items():
        assert found == pytest.approx(getattr(cpu, name), rel=0.02), name


@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_no_cost_is_ever_negative_and_none_fits_worse_than_nothing(rows: list[list[float]]):
    found = non_negative(rows, [1.0] * len(rows))
    assert all(value >= 0 for value in found)
    misses = sum((sum(a * x for a, x in zip(row, found, strict=True)) - 1) ** 2 for row in rows)
    assert misses <= len(rows) + 1e-6


def plan_of(*, gateways: int, encoders: int, engines: int, redis_bytes: int | None) -> Plan:
    return Plan(
        gateways=gateways,
        encoders=encoders,
        engines=engines,
        engine_requests_per_s=1.0,
        alone={},
        figures={},
        redis_bytes=redis_bytes,
    )


LARGE = plan_of(gateways=3, encoders=2, engines=5, redis_bytes=(3 << 30) - 1)
TEXT_ONLY = plan_of(gateways=1, encoders=0, engines=1, redis_bytes=0)


def test_the_command_for_compose_starts_what_the_plan_says():
    assert compose_command(LARGE, "llava-hf/llava-1.5-7b-hf") == (
        "MODEL=llava-hf/llava-1.5-7b-hf REDIS_MEMORY=3072MiB PORT=8000-8002 docker compose up --detach --wait "
        "--scale gateway=3 --scale vision_encoder=2 --scale text_engine=5"
    )
    assert compose_command(TEXT_ONLY, "a model") == (
        "MODEL='a model' docker compose up --detach --wait --scale vision_encoder=0 --scale text_engine=1"
    )


def test_the_command_for_compose_names_services_and_variables_that_its_file_has():
    file = (ROOT / "docker-compose.yml").read_text()
    words = compose_command(LARGE, "demo").split()
    variables = [word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)]
    services = [word.partition("=")[0] for before, word in itertools.pairwise(words) if before == "--scale"]
    assert variables == ["MODEL", "REDIS_MEMORY", "PORT"]
    assert all(f"${{{variable}:-" in file for variable in variables)
    assert set(services) <= yaml.safe_load(file)["services"].keys()


def test_the_command_for_kubernetes_sets_values_that_the_chart_has():
    words = shlex.split(helm_command(LARGE, "demo"))
    given = dict(word.split("=", 1) for before, word in itertools.pairwise(words) if before == "--set")
    values = yaml.safe_load((ROOT / "deploy/helm/diptych/values.yaml").read_text())
    for path in given:
        place = values
        for name in path.split("."):
            assert name in place, path
            place = place[name]
    assert [given[f"{name}.replicas"] for name in ("gateway", "visionEncoder", "textEngine")] == ["3", "2", "5"]
    assert (given["model"], given["redis.maxMemory"]) == ("demo", "3072MiB")
    assert given["redis.resources.limits.memory"] == "4864Mi"


@pytest.mark.parametrize(("written", "told"), [("512MiB", "512Mb"), ("2gb", "2gb"), ("700000000", "700000000")])
def test_redis_in_compose_is_told_either_way_of_writing_a_size_in_its_own(written: str, told: str, tmp_path: Path):
    shell, flag, script, _ = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["command"]
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    server.chmod(0o755)
    done = subprocess.run(
        [shell, flag, script.replace("$$", "$"), written],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "--save",
        "",
        "--appendonly",
        "no",
        "--maxmemory",
        told,
        *done.stdout.split()[-2:],
    ]


def test_hardware_comes_back_from_its_file_and_a_wrong_file_is_named(tmp_path: Path):
    CPU.save(tmp_path / "costs.json")
    assert load(str(tmp_path / "costs.json")) == CPU
    (tmp_path / "wrong.json").write_text('{"name": "x"}')
    for name in ("wrong.json", "none.json"):
        with pytest.raises(BadSetting, match="neither one of cpu, h100 nor a file"):
            load(str(tmp_path / name))


def test_a_running_engine_can_be_measured(tmp_path: Path):
    with real_stack(write_checkpoint("llama", tmp_path), engine={"max_model_len": 256}) as stack:
        found = asyncio.run(measure(stack.engine_urls[0], None))
        with pytest.raises(CommandFailed, match=r"--engine http.*: what answers there is no text engine; give the add"):
            asyncio.run(measure(str(stack.http.base_url), None))
        with pytest.raises(CommandFailed, match=r"--encoder http.*: what answers there is no vision encoder"):
            asyncio.run(measure(stack.engine_urls[0], stack.engine_urls[0]))
    assert found.costs.max_model_len == 256
    assert found.costs.step_s > 0
    assert found.costs.num_blocks > 0
    assert found.memory.kv_token_bytes is not None
    assert found.kv_bytes is not None
    assert found.kv_bytes <= 8 * 2**20


def test_an_address_where_nothing_listens_is_named():
    with pytest.raises(CommandFailed, match=r"--engine 127\.0\.0\.1:9: no text engine answers there \("):
        asyncio.run(measure("127.0.0.1:9", None))


def test_the_command_prints_a_plan_and_the_same_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["diptych", "plan", "--requests-per-s", "5", "--output-tokens", "10", "--pictures", "0.5"]
    outputs = []
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        outputs.append(capsys.readouterr().out)
    text, found = outputs[0], json.loads(outputs[1])
    replicas = found["replicas"]
    assert f"--scale vision_encoder={replicas['vision_encoder']} --scale text_engine={replicas['text_engine']}" in text
    assert all(command in text for command in found["start"].values())
    assert "MODEL=YOUR-MODEL " in text, "whose costs the preset's are nobody knows"
    assert found["simulated"]["ttft_p95_s"] <= found["target"]["ttft_s"]
    assert all(f"* {assumption}" in text for assumption in found["assumptions"])
