"""Promises of latency, with a clock of the test's own: steps take what a formula says."""

from __future__ import annotations

import random

import pytest

from echelon.serve.cache import Pages
from echelon.serve.scheduler import Scheduler, Sequence
from echelon.serve.slo import Pacer, Slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=5s,tbt=25ms", Slo(5.0, 0.025)),
        ("tbt=0.1s", Slo(None, 0.1)),
        (" ttft = 300ms ", Slo(0.3, None)),
    ],
)
def test_promises_are_read(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "tbt=-1s", "tbt=0s", "fast=1s", "ttft=5s;tbt=1s"])
def test_what_is_no_promise(text: str) -> None:
    with pytest.raises(ValueError, match="is not a promise: write ttft=5s"):
        Slo.parse(text)


def test_a_promise_is_made_once() -> None:
    with pytest.raises(ValueError, match="tbt is promised twice"):
        Slo.parse("tbt=25ms,tbt=3s")


def test_steps_are_learned() -> None:
    pacer = Pacer(Slo(tbt=0.05), 1000)
    chance = random.Random(0)
    assert pacer.can_promise(10**6, 0, 0), "nothing is refused before anything is known"
    for _ in range(300):
        answering, reading = chance.randint(0, 50), chance.randint(0, 100)
        pacer.took(answering, reading, 0.010 + 0.0002 * answering + 0.0005 * reading)
    assert pacer.expected(20, 40) == pytest.approx(0.034, rel=1e-3)
    assert pacer.budget(10) == 10 + int((0.05 / 1.1 - 0.012) / 0.0005), "what fits into 50 ms, and some to spare"
    assert pacer.budget(0) == 1000, "where nobody answers, nobody is kept waiting"
    assert pacer.most_running() == int((0.05 / 1.1 - 0.018) / 0.0002), "prompts go on beside them"


def test_what_reading_takes_is_not_forgotten_while_nothing_is_read() -> None:
    pacer = Pacer(Slo(tbt=0.05), 1000)
    for step in range(500):
        reading = step % 40 if step < 50 else 0
        pacer.took(10 + step % 7, reading, 0.010 + 0.0002 * (10 + step % 7) + 0.0005 * reading)
    assert pacer.expected(20, 40) == pytest.approx(0.034, rel=1e-3)


def simulate(
    slo: Slo | None,
    gap: float,
    stops: dict[int, float] | None = None,
    late: float = 0.0,
    says_when: bool = True,
) -> tuple[float, float, int, float]:
    """Requests every `gap` seconds: p99 of ttft and tbt, how many were refused, and tokens a second. In some steps the
    machine stops, for so many seconds. Readers hear of a step up to `late` seconds later.
    """
    chance = random.Random(0)
    pacer = Pacer(slo or Slo(), 256)
    scheduler = Scheduler(Pages(4000, 16), budget=256, most_running=64, pace=pacer if slo else None)
    now, arrived, refused, written, steps = 0.0, {}, 0, 0, 0
    last, ttft, tbt = {}, [], []
    coming = [number * gap for number in range(400)]
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0] <= now:
            when = coming.pop(0)
            length = chance.randint(20, 200)
            live = [*scheduler.running, *scheduler.waiting]
            ahead = length + sum(each.left for each in live if each.left > 1)
            if slo and not pacer.can_promise(ahead, len(scheduler.running), len(scheduler.waiting)):
                refused += 1
                continue
            sequence = Sequence([chance.randint(0, 9) for _ in range(length)], length + chance.randint(5, 40))
            arrived[sequence] = when
            scheduler.add(sequence)
        spans = scheduler.schedule()
        if not spans:
            now = coming[0]
            continue
        answering = sum(span.answers for span in spans)
        reading = sum(span.count for span in spans) - answering
        seconds = (0.004 + 0.00005 * answering + 0.0001 * reading) * chance.uniform(0.95, 1.05)
        seconds += (stops or {}).get(steps, 0.0)
        steps += 1
        now += seconds
        heard = now + chance.uniform(0, late)
        if says_when:
            pacer.heard(pacer.expected(answering, reading) if answering else None, heard)
        pacer.took(answering, reading, seconds)
        scheduler.advance(spans)
        for span in spans:
            if span.is_last:
                sequence = span.sequence
                if sequence in last:
                    tbt.append(heard - last[sequence])
                else:
                    ttft.append(heard - arrived[sequence])
                last[sequence] = heard
                written += 1
                scheduler.settle(sequence, chance.randint(0, 9))
                if len(sequence.tokens) == sequence.limit:
                    scheduler.remove(sequence)
                    pacer.ended(now)
    return sorted(ttft)[int(0.99 * len(ttft))], sorted(tbt)[int(0.99 * len(tbt))], refused, written / now


@pytest.mark.parametrize("gap", [0.1, 0.03, 0.005])
def test_promises_are_kept_and_the_rest_is_refused(gap: float) -> None:
    ttft, tbt, refused, speed = simulate(Slo(0.5, 0.012), gap)
    assert tbt <= 0.012
    assert ttft <= 0.5
    assert (refused > 0) == (gap < 0.02)
    ttft_without, tbt_without, _, speed_without = simulate(None, gap)
    assert speed > 0.6 * speed_without
    if gap < 0.02:
        assert tbt_without > 0.012, "without a promise this load would have broken it"
        assert ttft_without > 0.5


@pytest.mark.parametrize("gap", [0.03, 0.01])
def test_promises_are_made_to_readers_who_hear_late(gap: float) -> None:
    ttft, tbt, _, speed = simulate(Slo(0.5, 0.012), gap, late=0.003)
    assert tbt <= 0.012
    assert ttft <= 0.5
    _, too_late, _, speed_of_steps = simulate(Slo(0.5, 0.012), gap, late=0.003, says_when=False)
    assert too_late > 0.012, "who looks at steps alone breaks it"
    assert speed > 0.8 * speed_of_steps


def test_who_has_not_waited_tells_nothing() -> None:
    pacer, deaf = Pacer(Slo(tbt=0.05), 1000), Pacer(Slo(tbt=0.05), 1000)
    for step in range(160):
        pacer.heard(pacer.expected(10, 0) if step % 2 else None, now=step // 2 * 100 + step % 2 * 0.01)
        pacer.took(10, 0, 0.01)
        deaf.took(10, 0, 0.01)
    assert pacer.wait(1, 1, 0) == pytest.approx(deaf.wait(1, 1, 0), abs=1e-6)


@pytest.mark.parametrize(
    "stops",
    [{1: 0.5, 5: 0.3, 9: 0.2, 300: 0.2}, dict.fromkeys(range(0, 9999, 130), 0.1)],
    ids=["at first", "now and then"],
)
def test_a_machine_that_stops_for_a_moment_turns_nobody_away_for_long(stops: dict[int, float]) -> None:
    """It did: a few slow steps, and no more than two requests were answered at once for ever after."""
    ttft, tbt, refused, _ = simulate(Slo(2.0, 0.012), 0.03, stops)
    assert tbt <= 0.012
    assert ttft <= 2.0
    assert refused < 40, "of 400"
