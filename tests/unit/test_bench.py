"""`diptych bench`: its workloads are the recorded ones, its arithmetic and its comparisons are right."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.bench.cli import app
from diptych.bench.client import Reply, Target, request_body
from diptych.bench.compare import comparison_notes, comparison_table, read_columns
from diptych.bench.doubts import doubts
from diptych.bench.errors import BenchError
from diptych.bench.figures import over_runs, percentile, quotient
from diptych.bench.repeats import Plan, Run, count_quietest, wants_another
from diptych.bench.sessions import SessionShape, burst_requests, session_seed, sliding_window_turns
from diptych.bench.workloads import WORDS, Request, iter_requests

# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt_tokens", "num_output_tokens", "start", "digest"),
    [
        ("W1", 32, 16384, 4096, " sense night girl part policy", "12520ee98d53a01f"),
        ("W2", 64, 16815, 8609, " law center oil health industry", "3eba607f9bdbe6b6"),
        ("W3", 1, 64, 128, " group person news parent", "0b8ee74b150c8021"),
        ("W4", 16, 512, 1024, " thing president area relationship", "e5a6eb8dea78ff38"),
        ("W5", 16, 512, 1024, " service development decision building", "13fde05b48611faf"),
    ],
)
def test_a_workload_is_the_recorded_one(name, num_requests, num_prompt_tokens, num_output_tokens, start, digest):
    requests = list(iter_requests(name, seed=1))
    assert len(requests) == num_requests
    assert sum(request.num_prompt_tokens for request in requests) == num_prompt_tokens
    assert sum(request.num_output_tokens for request in requests) == num_output_tokens
    assert requests[0].text.startswith(start)
    assert hashlib.sha256("".join(request.text for request in requests).encode()).hexdigest().startswith(digest)


def test_the_mixed_lengths_of_w2_are_the_recorded_ones():
    requests = list(iter_requests("W2", seed=1))
    lengths = [(request.num_prompt_tokens, request.num_output_tokens) for request in requests]
    assert lengths[:3] == [(139, 191), (411, 244), (96, 187)]
    assert all(len(request.text.split()) == request.num_prompt_tokens for request in requests)


def test_the_pictures_are_the_recorded_ones():
    [w4] = next(iter_requests("W4", seed=1)).images
    [w5] = next(iter_requests("W5", seed=1)).images
    [salted] = next(iter_requests("W4", seed=1, salt="x")).images
    assert hashlib.sha256(w4).hexdigest() == "ac88b46808ee8236132076d97d12a4bd608e5cbaac4453a742e613281772d1f6"
    assert hashlib.sha256(w5).hexdigest() == "75071d5d88652e08b5fa4f5127f453a3ad55463006ba8705b9d4364f13a8a142"
    assert hashlib.sha256(salted).hexdigest() == "b37ac17d074c8e00a99f4d4c78cd32a2d219f0edda9b2c797680b9568f1c7b3d"


def test_w4_shows_sixteen_pictures_and_w5_one():
    assert len({request.images for request in iter_requests("W4", seed=1)}) == 16
    assert len({request.images for request in iter_requests("W5", seed=1)}) == 1


def test_a_salt_changes_words_but_no_length():
    plain, salted = (list(iter_requests("W2", 1, salt)) for salt in ("", "x"))
    assert salted[0].text != plain[0].text
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in salted] == [
        (r.num_prompt_tokens, r.num_output_tokens) for r in plain
    ]
    assert salted == list(iter_requests("W2", 1, "x"))


def test_every_word_is_one_plain_word():
    assert len(set(WORDS)) == 190
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)


def test_an_unknown_workload_is_refused_by_name():
    with pytest.raises(BenchError, match="'W9'"):
        next(iter_requests("W9", 1))
    with pytest.raises(BenchError, match="W8, W9"):
        Plan(("W1", "W8", "W9")).check()


def test_each_turn_of_w6_shows_one_new_picture_and_repeats_the_others():
    turns = sliding_window_turns(seed=1, user=2, shape=SessionShape(num_turns=4, window=3))
    assert [len(turn.images) for turn in turns] == [3, 3, 3, 3]
    for before, after in pairwise(turns):
        assert after.images[:-1] == before.images[1:]
        assert after.images[-1] not in before.images


def test_every_picture_of_w7_is_new():
    bursts = burst_requests(seed=1, shape=SessionShape(stream_s=3, burst_every_s=1, burst_size=2))
    assert [len(burst) for burst in bursts] == [2, 2, 2]
    assert len({request.images for burst in bursts for request in burst}) == 6


def test_a_session_seed_follows_seed_and_salt():
    assert session_seed(7, "") == 7
    assert session_seed(1, "a") != session_seed(1, "b")
    assert session_seed(2, "a") == session_seed(1, "a") + 1


# --- requests ---------------------------------------------------------------------------------------------------------


def test_words_make_room_for_the_chat_template():
    path, body = request_body(Target("", "m", text_api="chat", num_template_tokens=2), Request(" a b c d", 4, 1))
    assert path == "/v1/chat/completions"
    assert json.loads(body)["messages"][0]["content"] == "a b"


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_a_base_url_may_end_in_v1_or_not(url):
    assert Target(url, "m").url("/v1/completions") == "http://host:1/v1/completions"


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.95, 3.0),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.5, 3.0),
        (range(101), 0.95, 95),
        (range(101), 1.0, 100),
        ([1.0, 2.0], 0.99, 2.0),
    ],
)
def test_a_percentile_is_a_measured_value(values, share, expected):
    assert percentile(values, share) == expected


def test_several_runs_give_the_median_but_the_worst_of_errors_and_memory():
    runs = [
        {"output_tok_s": 10.0, "errors": 0, "short": 2, "peak_rss_mib": 7, "ttft_mean": None},
        {"output_tok_s": 30.0, "errors": 1, "short": 0, "peak_rss_mib": 5, "ttft_mean": 2.0},
        {"output_tok_s": 20.0, "errors": 0, "short": 0, "peak_rss_mib": 6},
    ]
    summary = over_runs(runs)
    assert summary == {"output_tok_s": 20.0, "errors": 1, "short": 2, "peak_rss_mib": 7, "ttft_mean": 2.0}


def test_a_quotient_needs_both_sides():
    assert quotient(6.0, 4.0) == 1.5
    assert quotient(None, 4.0) is None
    assert quotient(1.0, None) is None
    assert quotient(1.0, 0.0) is None


def test_time_per_token_does_not_depend_on_how_tokens_are_put_in_chunks():
    one_by_one = Reply(ttft_s=0.1, gaps_s=[0.1] * 8, num_output_tokens=9)
    in_fours = Reply(ttft_s=0.1, gaps_s=[0.4, 0.4], num_output_tokens=9)
    assert one_by_one.inter_token_s == pytest.approx(in_fours.inter_token_s)
    assert one_by_one.num_chunks == 9
    assert in_fours.num_chunks == 3


def test_a_figure_that_deceives_is_called_doubtful():
    clean = {"requests": 32, "errors": 0, "short": 0, "in_tok": 16384, "cached_tok": 320, "other_cpu": 0.05}
    assert doubts("W1", clean) == []
    assert "3 of 32 requests failed" in doubts("W1", clean | {"errors": 3})[0]
    assert "warm cache" in doubts("W1", clean | {"cached_tok": 16000})[0]
    assert doubts("W5", clean | {"cached_tok": 16000}) == []
    assert "0.50 cores" in doubts("W1", clean | {"other_cpu": 0.5})[0]
    assert "4.00 tokens per chunk" in doubts("W1", clean | {"tok_per_chunk": 4.0})[0]


def test_disturbed_runs_are_repeated_and_only_the_quietest_count():
    plan = Plan(("W3",), reps=2, extra_runs=2, max_foreign_cores=0.15)
    runs = [Run(1, {"other_cpu": 0.9}), Run(2, {"other_cpu": 0.0}), Run(3, {"other_cpu": 0.5})]
    assert wants_another(runs, plan)
    assert not wants_another([*runs, Run(4, {"other_cpu": 0.1})], plan)
    assert not wants_another([*runs, Run(4, {"other_cpu": 0.8})], plan)  # the extra runs are used up
    count_quietest(runs, reps=2)
    assert [run.counted for run in runs] == [False, True, True]


def test_runs_without_a_watched_process_are_never_repeated():
    assert wants_another([Run(1, {})], Plan(("W3",), reps=2))
    assert not wants_another([Run(1, {}), Run(2, {})], Plan(("W3",), reps=2))


# --- comparing --------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rendered(files: list[Path], *options: str) -> str:
    result = CliRunner().invoke(app, ["compare", *options, *map(str, files)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_comparison_shows_ratios_of_medians(tmp_path):
    runs = [{"counted": True, "output_tok_s": value, "ttft_mean": 2.0} for value in (90.0, 100.0, 200.0)]
    disturbed = {"counted": False, "output_tok_s": 1.0, "ttft_mean": 9.0}
    peer = write_lines(tmp_path / "a.jsonl", {"label": "peer", "workload": "W1", "runs": [*runs, disturbed]})
    ours = write_lines(tmp_path / "b.jsonl", {"label": "ours", "workload": "W1", "output_tok_s": 150, "ttft_mean": 1})
    lines = rendered([peer, ours], "--markdown").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["workload", "figure", "peer", "ours", "ours ÷ peer"]
    assert cells[2] == ["W1", "output tok/s", "100.0", "150.0", "1.50×"]
    assert cells[3] == ["W1", "TTFT mean s", "2.000", "1.000", "0.50×"]
    assert len(cells) == 4


def test_lines_of_one_label_in_one_file_are_pooled_but_two_files_are_two_servers(tmp_path):
    before = write_lines(
        tmp_path / "before.jsonl",
        *({"label": "ours", "workload": "W1", "output_tok_s": value} for value in (10.0, 20.0, 60.0)),
    )
    after = write_lines(tmp_path / "after.jsonl", {"label": "ours", "workload": "W1", "output_tok_s": 40.0})
    first, second = read_columns([before, after])
    assert (first.name, second.name) == ("ours (before)", "ours (after)")
    assert first.figures("W1") == {"output_tok_s": 20.0}
    assert second.figures("W1") == {"output_tok_s": 40.0}


def test_figures_in_groups_are_read_too(tmp_path):
    line = {"label": "peer", "workload": "W7", "text_only": {"p99": 0.02}, "with_bursts": {"p99": 0.03}}
    [column] = read_columns([write_lines(tmp_path / "a.jsonl", line)])
    assert column.figures("W7") == {"text_only_p99": 0.02, "with_bursts_p99": 0.03}


def test_servers_that_count_equal_prompts_differently_are_told(tmp_path):
    def line(label: str, num_prompt_tokens: int) -> dict[str, Any]:
        return {"label": label, "workload": "W1", "runs": [{"seed": 1, "in_tok": num_prompt_tokens}]}

    columns = read_columns([write_lines(tmp_path / "a.jsonl", line("a", 16384), line("b", 17000))])
    assert ["a 16384, b 17000" in note for note in comparison_notes(columns)] == [True]
    assert comparison_table(columns).row_count == 0


@pytest.mark.parametrize("content", ["not json\n", '{"label": "a"}\n', '["W1"]\n'])
def test_a_file_that_holds_no_results_stops_the_comparison_with_its_line(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    result = CliRunner().invoke(app, ["compare", str(path), str(tmp_path / "missing.jsonl")])
    assert result.exit_code == 2
    assert "a.jsonl, line 1" in result.output.replace("\n", "")
