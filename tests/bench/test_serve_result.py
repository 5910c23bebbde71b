"""The figures of `echelon bench serve`, computed by hand beside."""

from __future__ import annotations

import json
import math

import pytest

from echelon.bench.serve_result import METRICS, Outcome, Result, most_at_once, most_in_a_second

SLOW = Outcome(0.0, 0.5, 10, 3, ttft=0.5, gaps=[0.25, 0.75], latency=1.5, text="abc")
SHORT = Outcome(1.0, 0.0, 20, 1, ttft=0.25, latency=0.25, text="d")
BROKEN = Outcome(1.0, 0.0, 30, 2, ttft=0.1, gaps=[0.1], latency=0.2, error="it broke")
RESULT = Result([SLOW, SHORT, BROKEN], 2.0, (50.0, 99.9), {"ttft": 500.0, "tpot": 400.0}, {"backend": "openai"})


def test_figures():
    told = RESULT.fields()
    counts = {"duration": 2.0, "completed": 2, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 4}
    rates = {"request_throughput": 1.0, "output_throughput": 2.0, "total_token_throughput": 17.0}
    peaks = {"max_output_tokens_per_s": 2, "max_concurrent_requests": 2}
    assert {name: told[name] for name in counts | rates | peaks} == counts | rates | peaks
    assert told["request_goodput"] == 0.5  # the slow one's 500 ms a token are too much
    assert (told["mean_ttft_ms"], told["median_ttft_ms"], told["std_ttft_ms"]) == (375.0, 375.0, 125.0)
    assert told["p99.9_ttft_ms"] == pytest.approx(250 + 0.999 * 250)
    assert (told["mean_tpot_ms"], told["std_tpot_ms"]) == (500.0, 0.0)  # who sends one token has none
    assert (told["mean_itl_ms"], told["p50_itl_ms"]) == (500.0, 500.0)
    assert (told["mean_e2el_ms"], told["p50_e2el_ms"]) == (875.0, 875.0)
    for metric in METRICS:
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p50", "p99.9")} <= told.keys()


def test_goodput_is_for_those_who_ask():
    assert Result([SLOW], 1.0).fields()["request_goodput"] is None
    assert Result([SLOW], 1.0, objectives={"e2el": 1500.0}).fields()["request_goodput"] == 1.0
    assert Result([SLOW], 1.0, objectives={"e2el": 1499.0}).fields()["request_goodput"] == 0.0
    assert Result([SHORT], 1.0, objectives={"tpot": 0.0}).fields()["request_goodput"] == 1.0


def test_peaks():
    assert most_in_a_second([]) == most_at_once([]) == 0
    after = Outcome(SLOW.end, ttft=0.5, latency=0.5)
    assert most_at_once([SLOW, after]) == 1
    assert most_at_once([SLOW, SHORT, after]) == 2
    assert list(SLOW.arrivals()) == [0.5, 0.75, 1.5]
    assert most_in_a_second([SLOW, Outcome(3.25, ttft=0.25, gaps=[0.1, 0.1, 0.1], output_tokens=4)]) == 4
    assert most_in_a_second([Outcome(3.25, ttft=0.25, gaps=[0.1, 0.1, 0.1], output_tokens=20)]) == 20


def test_nothing_was_answered():
    told = Result([BROKEN], 2.0).fields()
    assert (told["completed"], told["failed"], told["mean_ttft_ms"], told["output_throughput"]) == (0, 1, 0.0, 0.0)


def test_the_table_has_the_rows_that_are_known():
    rows = list(RESULT.lines(["ttft", "e2el"], rate=4.0, most=8))
    assert rows == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           4.00      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      30        ",
        "Total generated tokens:                  4         ",
        "Request throughput (req/s):              1.00      ",
        "Request goodput (req/s):                 0.50      ",
        "Output token throughput (tok/s):         2.00      ",
        "Peak output token throughput (tok/s):    2.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          17.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          375.00    ",
        "Median TTFT (ms):                        375.00    ",
        "P50 TTFT (ms):                           375.00    ",
        "P99.9 TTFT (ms):                         499.75    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          875.00    ",
        "Median E2EL (ms):                        875.00    ",
        "P50 E2EL (ms):                           875.00    ",
        "P99.9 E2EL (ms):                         1498.75   ",
        "==================================================",
    ]
    few = "\n".join(Result([SLOW], 2.0).lines([], rate=math.inf))
    assert "configured" not in few
    assert "goodput" not in few


def test_what_is_written(tmp_path):
    path = tmp_path / "deep" / "result.json"
    RESULT.write(path, detailed=False)
    told = json.loads(path.read_text())
    assert (told["backend"], told["completed"]) == ("openai", 2)
    assert "ttfts" not in told
    RESULT.write(path, detailed=True)
    told = json.loads(path.read_text())
    assert (told["input_lens"], told["output_lens"], told["start_times"]) == ([10, 20, 30], [3, 1, 2], [0.0, 1.0, 1.0])
    assert (told["itls"], told["queue_times"]) == ([[0.25, 0.75], [], [0.1]], [0.5, 0.0, 0.0])
    assert (told["generated_texts"], told["errors"]) == (["abc", "d", ""], ["", "", "it broke"])
