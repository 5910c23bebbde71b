"""The counts, as Prometheus reads them and as the page shows them."""

from __future__ import annotations

import threading

import pytest

from echelon.serve.metrics import SAMPLES, Metrics, percentile

prometheus = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics, model: str = "tiny") -> dict[tuple[str, ...], float]:
    """By name and labels, as Prometheus's own parser reads them."""
    found = {}
    for family in prometheus.text_string_to_metric_families(metrics.render(model)):
        assert family.documentation, f"{family.name} says nothing of itself"
        for sample in family.samples:
            assert sample.labels.pop("model_name") == model
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def one_request() -> Metrics:
    metrics = Metrics()
    metrics.arrived(12)
    metrics.prefix(12, 8)
    metrics.step(running=1, waiting=3, pages_used=2, pages=8, tokens=4, seconds=0.5)
    metrics.first_token(0.03)
    metrics.next_token(0.004)
    metrics.preempted(2)
    metrics.refused()
    metrics.finished("length", 0.9, 12, 2)
    metrics.finished("cancelled", 0.1, 5, 1)
    return metrics


def test_prometheus_reads_the_counts() -> None:
    found = samples(one_request())
    expected = {
        ("echelon:num_requests_running",): 1,
        ("echelon:num_requests_waiting",): 3,
        ("echelon:kv_cache_usage_perc",): 0.25,
        ("echelon:prompt_tokens_total",): 12,
        ("echelon:generation_tokens_total",): 2,
        ("echelon:num_preemptions_total",): 2,
        ("echelon:prefix_cache_queries_total",): 12,
        ("echelon:prefix_cache_hits_total",): 8,
        ("echelon:num_requests_refused_total",): 1,
        ("echelon:request_success_total", "length"): 1,
        ("echelon:request_success_total", "abort"): 1,
        ("echelon:request_success_total", "stop"): 0,
        ("echelon:step_seconds_total",): 0.5,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_to_first_token_seconds", 0.03),
        ("inter_token_latency_seconds", 0.004),
        ("e2e_request_latency_seconds", 0.9),  # without the one that was cancelled
        ("iteration_tokens_total", 4),
        ("request_prompt_tokens", 12),
        ("request_generation_tokens", 2),
    ],
)
def test_a_histogram_counts_up_to_each_bound(name: str, value: float) -> None:
    found = samples(one_request())
    counts = {float(key[1]): count for key, count in found.items() if key[0] == f"echelon:{name}_bucket"}
    assert counts == {bound: float(bound >= value) for bound in counts}
    assert counts[float("inf")] == found[f"echelon:{name}_count",] == 1
    assert found[f"echelon:{name}_sum",] == pytest.approx(value)


def test_a_value_at_a_bound_is_within_it() -> None:
    metrics = Metrics()
    metrics.first_token(0.25)
    assert samples(metrics)["echelon:time_to_first_token_seconds_bucket", "0.25"] == 1


def test_any_name_of_a_model_is_told() -> None:
    assert samples(Metrics(), 'a"b\\c\nd')


def test_rates_are_of_the_last_ten_seconds() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for _ in range(100):  # tokens, five a second
        clock.now += 0.2
        metrics.next_token(0.2)
    assert metrics.snapshot()["tokens_per_second"] == pytest.approx(5, rel=0.1)
    assert sum(metrics.snapshot()["tokens_series"]) == pytest.approx(100, abs=5)
    clock.now += 11
    assert metrics.snapshot()["tokens_per_second"] == 0


def test_percentiles_forget_what_is_old() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    metrics.first_token(60.0)
    clock.now += 1000
    for hundredth in range(101):
        metrics.first_token(hundredth / 100)
    assert metrics.snapshot()["ttft"] == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99})
    assert metrics.snapshot()["tbt"] == {"p50": None, "p90": None, "p99": None}


def test_memory_is_bounded() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for _ in range(3 * SAMPLES):
        clock.now += 1
        metrics.next_token(0.1)
    assert len(metrics._recent_next._values) <= SAMPLES
    assert len(metrics._generated._sums) < 100


@pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (50, 2.0), (75, 2.5), (100, 3.0)])
def test_a_percentile_lies_between_the_nearest_values(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0], share) == expected


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(500):
            metrics.arrived(1)
            metrics.next_token(0.01)
            metrics.snapshot()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = samples(metrics)
    assert found["echelon:prompt_tokens_total",] == found["echelon:generation_tokens_total",] == 2000
