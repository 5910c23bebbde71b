"""The scheduler and its pages under any order of arrivals, ends, and cancellations, without a model.

A stand-in for the cache notes for each place of each page which tokens, up to its own, were computed into it. So a page
that is used twice, freed too early or found by mistake shows at once as a place that holds something else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.serve.cache import Pages
from echelon.serve.scheduler import Scheduler, Sequence, Span
from echelon.serve.step import PENDING


@dataclass
class World:
    """A scheduler, and what its pages would hold."""

    pages: int
    size: int
    budget: int
    most_running: int
    ahead: bool = False
    flight: list[Span] = field(default_factory=list)
    unsettled: dict[Sequence, list[tuple[tuple[int, int], tuple[int, ...]]]] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    first_run: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(Pages(self.pages, self.size), budget=self.budget, most_running=self.most_running)

    @property
    def live(self) -> list[Sequence]:
        return self.scheduler.running + self.scheduler.waiting

    def step(self, next_token: int) -> list[Sequence]:
        """Take one; returns what has ended. `ahead`: its tokens are known only when the next one is under way."""
        spans = self.scheduler.schedule()
        assert spans or self.flight or not self.live, "something is there to do, and nothing is done"
        self.check_spans(spans)
        for span in spans:
            self.compute(span)
        self.scheduler.advance(spans)
        landing, self.flight = (self.flight, spans) if self.ahead else (spans, [])
        ended = []
        for span in landing:
            if span.is_last and span.sequence in self.live:
                self.settle(span.sequence, next_token)
                if span.start + span.count + 1 >= span.sequence.limit:
                    self.scheduler.remove(span.sequence)
                    ended.append(span.sequence)
        self.check_pages()
        return ended

    def settle(self, sequence: Sequence, token: int) -> None:
        self.scheduler.settle(sequence, token)
        for where, held in self.unsettled.pop(sequence, []):
            if self.held[where] is held:  # and not of another sequence by now
                self.hold(where, sequence, len(held))

    def hold(self, where: tuple[int, int], sequence: Sequence, count: int) -> None:
        """At a place the first tokens of a sequence, of which one may be pending."""
        self.held[where] = held = tuple(sequence.tokens[:count])
        if PENDING in held:
            self.unsettled.setdefault(sequence, []).append((where, held))

    def check_spans(self, spans: list[Span]) -> None:
        assert len({id(span.sequence) for span in spans}) == len(spans)
        assert len(self.scheduler.running) <= self.most_running
        answering = sum(span.answers for span in spans)
        assert sum(span.count for span in spans) <= max(self.budget, answering)
        assert [span.count > 1 for span in spans] == sorted(span.count > 1 for span in spans)
        for span in sorted(spans, key=lambda each: each.sequence.order):
            assert span.sequence in self.scheduler.running
            assert span.start == span.sequence.computed
            if span.sequence not in self.first_run:
                self.first_run.append(span.sequence)

    def compute(self, span: Span) -> None:
        sequence = span.sequence
        for place in range(span.start):  # what attention will read
            assert self.held[self.where(sequence, place)] == tuple(sequence.tokens[: place + 1])
        for place in range(span.start, span.start + span.count):
            self.hold(self.where(sequence, place), sequence, place + 1)

    def where(self, sequence: Sequence, place: int) -> tuple[int, int]:
        return sequence.pages[place // self.size], place % self.size

    def check_pages(self) -> None:
        held = {page for sequence in self.live for page in sequence.pages}
        assert self.scheduler.pages.used == len(held), "a page is leaked, or free although it is held"
        assert not any(sequence.pages for sequence in self.scheduler.waiting)
        for name in ("running", "waiting"):
            order = [sequence.order for sequence in getattr(self.scheduler, name)]
            assert order == sorted(order)


arrivals = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 10), st.sampled_from([0, 0, 0, -1, 1])
)
actions = st.lists(
    st.one_of(arrivals, st.just("step"), st.just("step"), st.tuples(st.just("cancel"), st.integers(0, 30))), max_size=60
)


@settings(max_examples=500)
@given(
    actions,
    st.integers(3, 14),
    st.sampled_from([2, 4]),
    st.integers(1, 12),
    st.integers(1, 6),
    st.booleans(),
    st.randoms(),
)
def test_any_order_of_events(actions, pages, size, budget, most_running, ahead, random) -> None:  # type: ignore[no-untyped-def]
    world = World(pages, size, budget, most_running, ahead)
    arrived, cancelled, ended = [], [], []
    for action in actions:
        if action == "step":
            ended += world.step(random.randint(0, 1))
        elif action[0] == "cancel":
            live = world.live
            if live:
                cancelled.append(live[action[1] % len(live)])
                world.scheduler.remove(cancelled[-1])
                world.check_pages()
        else:
            prompt, more, priority = action
            sequence = Sequence(list(prompt), min(len(prompt) + more, pages * size), priority)
            if len(prompt) < sequence.limit:
                arrived.append(sequence)
                world.scheduler.add(sequence)
    for _ in range(100 + 40 * len(arrived)):  # nobody starves
        if not world.live:
            break
        ended += world.step(random.randint(0, 1))
    assert {*map(id, arrived)} == {*map(id, ended), *map(id, cancelled)}
    assert world.scheduler.pages.used == 0
    for priority in (-1, 0, 1):  # first come, first served
        order = [sequence.number for sequence in world.first_run if sequence.priority == priority]
        assert order == sorted(order)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_prompts_are_cut_by_the_budget_and_answers_are_sure_of_theirs() -> None:
    world = World(pages=20, size=4, budget=6, most_running=8)
    short, long = Sequence(tokens(2), 10), Sequence(tokens(20, 100), 30)
    world.scheduler.add(short)
    world.scheduler.add(long)
    counts = []
    for _ in range(5):
        spans = world.scheduler.schedule()
        counts.append([span.count for span in spans])
        world.scheduler.advance(spans)
        for span in spans:
            if span.is_last:
                world.scheduler.settle(span.sequence, 0)
    assert counts == [[2, 4], [1, 5], [1, 5], [1, 5], [1, 1]]


def test_a_known_beginning_is_not_computed_again() -> None:
    world = World(pages=20, size=4, budget=100, most_running=8)
    for length, cached in ((12, 0), (12, 8), (15, 12), (8, 4)):  # of a whole prompt the last token is computed
        sequence = Sequence(tokens(length), length + 1)
        world.scheduler.add(sequence)
        world.step(7)
        assert sequence.cached == cached


def test_pages_unused_for_longest_are_forgotten_first() -> None:
    world = World(pages=4, size=4, budget=100, most_running=1)
    for first in (0, 100, 0, 200):  # two pages each: the third finds the first, the fourth needs those of the second
        world.scheduler.add(Sequence(tokens(7, first), 8))
        world.step(7)
    assert world.scheduler.counts.found == 4
    for first, found in ((0, 8), (100, 8)):
        world.scheduler.add(Sequence(tokens(7, first), 8))
        world.step(7)
        assert world.scheduler.counts.found == found


def test_one_that_is_more_urgent_takes_the_place_of_others() -> None:
    world = World(pages=4, size=4, budget=100, most_running=2)
    usual, urgent = Sequence(tokens(10), 16), Sequence(tokens(10, 50), 12, priority=-1)
    world.scheduler.add(usual)
    world.step(0)
    world.scheduler.add(urgent)
    world.step(0)
    assert world.scheduler.running == [urgent]
    assert world.scheduler.waiting == [usual]
    assert world.scheduler.counts.preempted == 1
    for _ in range(20):
        if usual in world.step(0):
            break
    else:
        pytest.fail("what was pre-empted has not come to its end")


def test_nobody_is_pre_empted_in_vain() -> None:
    world = World(pages=10, size=4, budget=100, most_running=4)
    first, less_urgent = Sequence(tokens(20), 24), Sequence(tokens(8, 50), 16, priority=1)
    for sequence in (first, less_urgent):
        world.scheduler.add(sequence)
    world.step(0)
    world.scheduler.add(Sequence(tokens(30, 100), 32))  # which will not fit before the first has ended
    world.step(0)
    assert world.scheduler.running == [first, less_urgent]
    assert world.scheduler.counts.preempted == 0


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens never fit into a cache of 16"):
        World(pages=4, size=4, budget=4, most_running=1).scheduler.add(Sequence(tokens(3), 17))


def test_contents_are_told_apart_by_all_that_came_before() -> None:
    pages = Pages(8, 2)
    first, second = pages.take(), pages.take()
    one = pages.name(first, 0, (1, 2))
    two = pages.name(second, one, (1, 2))
    assert one != two
    assert pages.find([1, 2, 1, 2, 9])[0] == [first, second]
    assert pages.find([9, 9, 1, 2, 9])[0] == []
    assert pages.find([1, 2])[0] == [], "at least one token is left to compute"
    again = pages.take()
    assert pages.name(again, 0, (1, 2)) == one, "the same content has one number"
    assert pages.find([1, 2, 9])[0] == [first]
    assert len({*itertools.chain([first, second, again])}) == 3


def test_a_prompt_that_was_read_token_by_token_is_known() -> None:
    pages = Pages(8, 2)
    scheduler = Scheduler(pages, budget=1, most_running=2)
    sequence = Sequence(list(range(7)), 9)
    scheduler.add(sequence)
    for _ in range(6):
        spans = scheduler.schedule()
        assert [(span.count, span.is_last) for span in spans] == [(1, False)]
        scheduler.advance(spans)
    scheduler.remove(sequence)
    assert len(pages.find(list(range(7)))[0]) == 3
