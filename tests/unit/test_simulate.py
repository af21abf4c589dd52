"""The simulator of clusters: nothing is lost, equal arguments give equal figures, costs add up as the model says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.simulate import main
from diptych.simulator.cluster import simulate
from diptych.simulator.costs import PRESETS
from diptych.simulator.report import figures
from diptych.simulator.trace import MIXES, Conversation, Turn, bursty, make_trace, poisson
from diptych.simulator.world import Result, Settings

CPU = PRESETS["cpu"]


def played(
    settings: Settings, *, mix: str = "chat", num_requests: int = 120, rate: float = 2.0, seed: int = 0
) -> Result:
    trace = make_trace(MIXES[mix], poisson(rate, seed), num_requests=num_requests, seed=seed)
    return simulate(CPU, settings, trace, seed=seed)


def one_by_one(*turns: Turn, every_s: float = 1000.0) -> Iterator[Conversation]:
    return (Conversation(i * every_s, 0, 0, (turn,)) for i, turn in enumerate(turns))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("routing", ["affinity", "round_robin"])
def test_every_request_ends_and_every_block_comes_back(mix: str, routing: str):
    """`simulate` itself asserts that no engine holds work or blocks at the end."""
    result = played(Settings(engines=3, encoders=2, routing=routing, max_prefill_tokens_while_decoding=192), mix=mix)
    assert (result.num_requests, result.num_finished, result.num_refused) == (120, 120, 0)
    assert len(result.ttft) == 120
    assert len(result.gaps) == result.num_output_tokens - 120
    assert result.num_prompt_tokens > result.num_cached_tokens


def test_equal_arguments_give_equal_figures_and_another_seed_others():
    settings = Settings(engines=2, max_prefill_tokens_while_decoding=128)
    first, again, other = (figures(played(settings, seed=seed), 2) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_request_alone_takes_what_the_cost_model_says():
    result = simulate(CPU, Settings(), one_by_one(Turn(0, 300, 3)))
    prefill = CPU.step_s + 300 * CPU.prompt_token_s + 300 * 150 * CPU.attention_pair_s
    assert list(result.ttft) == pytest.approx([prefill])
    assert list(result.gaps) == pytest.approx([CPU.decode_step_s(1, 300), CPU.decode_step_s(1, 301)])


def test_a_picture_costs_its_encode_and_its_fetch_once():
    turn = Turn(0, 20, 2, images=(7,))
    result = simulate(CPU, Settings(), one_by_one(turn, turn))
    assert result.num_encodes == 1
    assert result.num_images == 2
    encode_and_fetch = CPU.encode_s + CPU.encode_image_s + CPU.fetch_s
    assert result.ttft[0] > encode_and_fetch > result.ttft[1]
    assert result.num_cached_tokens == 196 // 16 * 16


def test_a_full_engine_refuses_and_the_rest_is_answered():
    trace = (Conversation(0.0, 0, 0, (Turn(0, 100, 5),)) for _ in range(40))
    result = simulate(CPU, Settings(max_num_seqs=4, max_waiting_requests=8), trace)
    assert result.num_refused > 0
    assert result.num_finished == 40 - result.num_refused


def test_a_small_cache_preempts_and_loses_nobody():
    trace = (Conversation(0.0, 0, 0, (Turn(0, 100, 100),)) for _ in range(16))
    result = simulate(replace(CPU, num_blocks=64), Settings(), trace)
    assert result.num_preemptions > 0
    assert result.num_finished == 16
    assert result.max_kv_use > 0.9


def test_a_limit_on_prefill_shortens_the_longest_gap():
    free, limited = (
        played(Settings(max_prefill_tokens_while_decoding=limit), mix="documents", rate=3.0) for limit in (None, 64)
    )
    assert max(limited.gaps) < max(free.gaps) / 2
    assert limited.num_output_tokens == free.num_output_tokens


def test_affinity_finds_more_of_conversations_in_the_cache_than_turns_do():
    hits = {
        routing: figures(played(Settings(engines=4, routing=routing), num_requests=300), 4)["prefix_hits"]
        for routing in ("affinity", "round_robin")
    }
    assert hits["affinity"] > hits["round_robin"] + 0.1


@pytest.mark.parametrize("arrivals", [poisson, bursty])
def test_arrivals_are_in_order_and_have_their_rate(arrivals: Callable[[float, int], Iterator[float]]):
    times = list(itertools.islice(arrivals(5.0, 1), 5000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.15)


def test_settings_given_as_lists_are_compared_line_by_line(capsys: pytest.CaptureFixture[str]):
    argv = ["--requests", "40", "--engines", "1,2", "--max-prefill-tokens-while-decoding", "none,64"]
    main(argv)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0].startswith("| engines | max_prefill_tokens_while_decoding | TTFT p50, s |")
    assert [line.split("|")[1:3] for line in table[2:]] == [[f" {n} ", f" {p} "] for n in "12" for p in ("None", "64")]
    main([*argv, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["engines"] for line in lines] == [1, 1, 2, 2]
    assert {line["num_requests"] for line in lines} == {40}


def test_the_cpu_preset_meets_the_measured_workloads(capsys: pytest.CaptureFixture[str]):
    """bench/results/2026-11-30.md, measured without a limit beside decodes. W1 and W3 made the preset, W2 tests it."""
    main(["--workload", "W1,W2,W3", "--max-prefill-tokens-while-decoding", "none", "--json"])
    rows = {row["workload"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    for name, figure, measured in [
        ("W1", "output_tokens_per_s", 413),
        ("W1", "gap_p95_ms", 177),
        ("W2", "output_tokens_per_s", 618),
        ("W2", "ttft_mean_s", 2.79),
        ("W2", "gap_p95_ms", 176),
        ("W3", "output_tokens_per_s", 93),
    ]:
        assert rows[name][figure] == pytest.approx(measured, rel=0.1)
