"""What each step computes: a small pure class, without a clock, a thread or a tensor.

A request is a list of tokens, of which some are computed: their keys and values are in the cache. A step computes more
of them for many requests at once, under a budget of tokens. For a request that answers that is its newest token; a
prompt is taken in chunks, as large as the budget leaves; when the last token of a request is computed, the next one is
known. So prompts and answers are the same thing, and a request that was pre-empted (its pages were needed) is just one
of which nothing is computed.

A step is under way (`advance`) before its tokens are known (`settle`), and the next may be scheduled in between: then a
request has a token of which only the place is known, and goes on from it.

Order is by priority, then arrival. In it requests are admitted, when memory is there for all that they hold; in it they
share the budget; and from its end they are pre-empted. So the first of them always advances, and in the end all do.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from echelon.serve.cache import ROOT, Pages
from echelon.serve.step import PENDING, Part


@dataclass(eq=False)
class Sequence:
    """One answer that is being made. `limit` is how many tokens it may have at most, with its prompt."""

    tokens: list[int]
    limit: int
    priority: int = 0  # smaller is served earlier
    number: int = 0  # of its arrival
    prompt: int = field(init=False)
    computed: int = 0
    row: int = -1  # while it runs, in the table of pages
    pages: list[int] = field(default_factory=list)
    told: int = 0  # of its pages, those that have been put into the table
    named: int = 0  # of its pages, those whose content has a number
    content: int = ROOT  # the last such number
    cached: int | None = None  # of the prompt, what was found in the cache when it was first admitted

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def left(self) -> int:
        """Tokens that are there and not computed."""
        return len(self.tokens) - self.computed

    @property
    def is_pending(self) -> bool:
        """Whether its last token is still to come, from a step that is under way."""
        return self.tokens[-1] == PENDING


@dataclass(slots=True)
class Span:
    """What a step computes of a sequence: `count` tokens from `start` on."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool  # whether the next token will be known

    def part(self) -> Part:
        """It, to be computed: the pages that it needs are told, once."""
        sequence, told = self.sequence, self.sequence.told
        pages = sequence.pages
        new = pages[told:]
        if new:
            sequence.told = len(pages)
        return Part(
            sequence.row, self.start, sequence.tokens[self.start : self.start + self.count], told, new, self.is_last
        )

    @property
    def answers(self) -> bool:
        """Whether it is the newest token of an answer (or the last one of a prompt), and not more of a prompt."""
        return self.count == 1 and self.is_last


class Counts(NamedTuple):
    """Since the beginning: sequences pre-empted; tokens of prompts, and those of them that the cache had."""

    preempted: int = 0
    asked: int = 0
    found: int = 0

    def plus(self, preempted: int = 0, asked: int = 0, found: int = 0) -> Counts:
        return Counts(self.preempted + preempted, self.asked + asked, self.found + found)


class Pace(Protocol):
    """How much a step may do so that it ends in time; see slo.py."""

    def budget(self, answering: int) -> int: ...

    def most_running(self) -> int: ...


class Scheduler:
    """`budget` tokens a step at most, of `most_running` sequences."""

    def __init__(self, pages: Pages, *, budget: int, most_running: int, pace: Pace | None = None) -> None:
        self.pages, self.pace = pages, pace
        self._budget, self._most_running = budget, most_running
        self.waiting: list[Sequence] = []  # both in order
        self.running: list[Sequence] = []
        self._arrived = 0
        self._rows = list(range(most_running))[::-1]  # which nobody has
        self.counts = Counts()

    def add(self, sequence: Sequence) -> None:
        capacity = self.pages.count * self.pages.size
        if sequence.limit > capacity:
            raise ValueError(f"{sequence.limit} tokens never fit into a cache of {capacity}")
        sequence.number = self._arrived
        self._arrived += 1
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or is not wanted any more."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._free(sequence)

    def schedule(self) -> list[Span]:
        """The spans of the next step, those of one token first; none if nothing is there to do."""
        answering = 0
        for sequence in self.running:
            length = len(sequence.tokens)
            answering += length - sequence.computed == 1 and length < sequence.limit
        budget = self._budget if self.pace is None else min(self._budget, self.pace.budget(answering))
        spans: dict[Sequence, Span] = {}
        pressed = False
        spare = max(budget - answering, 0)  # for prompts: each answer is sure of its next token
        for sequence in list(self.running):
            if sequence.row < 0:
                break  # pre-empted, as all after it
            length, computed = len(sequence.tokens), sequence.computed
            if length >= sequence.limit:  # no more of it is to be computed; its last token may be pending
                continue
            left = length - computed
            count = min(left, spare) if left > 1 else 1
            while count and not self._reserve(sequence, computed + count):
                pressed = True
                if self._preempt(spans) is sequence:
                    count = 0
            if count:
                spare -= count if left > 1 else 0
                spans[sequence] = Span(sequence, computed, count, count == left)
        while not pressed and spare > 0 and self.waiting:
            if self.waiting[0].is_pending or not self._admit(self.waiting[0], spans):
                break
            sequence = self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=_order)
            count = min(sequence.left, spare)
            self._reserve(sequence, sequence.computed + count)
            spans[sequence] = Span(sequence, sequence.computed, count, count == sequence.left)
            spare -= count
        found = spans.values()
        return [span for span in found if span.count == 1] + [span for span in found if span.count > 1]

    def advance(self, spans: list[Span]) -> None:
        """The step is under way: for all steps after it what it computes is in the cache."""
        for span in spans:
            sequence = span.sequence
            sequence.computed = span.start + span.count
            if span.is_last:
                sequence.tokens.append(PENDING)
            if not span.answers:  # a page that an answer fills is named when its next token is known
                self._name(sequence)

    def settle(self, sequence: Sequence, token: int) -> None:
        """The token that was pending is this one. Another may be by now."""
        tokens = sequence.tokens
        tokens[-2 if len(tokens) > 1 and tokens[-2] == PENDING else -1] = token
        self._name(sequence)

    def _name(self, sequence: Sequence) -> None:
        """Its pages that are full, of tokens that are known."""
        size = self.pages.size
        while (end := (sequence.named + 1) * size) <= sequence.computed and sequence.tokens[end - 1] != PENDING:
            first = sequence.named * size
            tokens = sequence.tokens[first:end]
            sequence.content = self.pages.name(sequence.pages[sequence.named], sequence.content, tokens)
            sequence.named += 1

    def _admit(self, sequence: Sequence, spans: dict[Sequence, Span]) -> bool:
        """Whether it may run now, with what the cache knows of it. A more urgent one takes the place of others."""
        if not self._fits(sequence):
            less_urgent = [each for each in self.running if each.priority > sequence.priority]
            if not self._fits(sequence, without=less_urgent):
                return False
            while not self._fits(sequence):
                self._preempt(spans)
        found, content = self.pages.find(sequence.tokens)
        self.pages.share(found)
        sequence.row = self._rows.pop()
        sequence.pages, sequence.computed = found, len(found) * self.pages.size
        sequence.named, sequence.content = len(found), content
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.counts = self.counts.plus(asked=sequence.prompt, found=sequence.computed)
        return True

    def _fits(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether there is memory for it, and a page for each that runs and will grow; if some of those did not run."""
        running = len(self.running) - len(without)
        most = self._most_running if self.pace is None else min(self._most_running, self.pace.most_running())
        found, _ = self.pages.find(sequence.tokens)
        if without:
            kept = {page for each in self.running if each not in without for page in each.pages}
            free, shared = self.pages.count - len(kept), sum(page not in kept for page in found)
        else:
            free, shared = self.pages.free, self.pages.unheld(found)
        missing = self.pages.needed(len(sequence.tokens)) - len(found)
        return free - shared - missing >= running and running < max(most, 1)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for so many of its tokens, if there are any left."""
        if tokens <= len(sequence.pages) * self.pages.size:
            return True
        missing = self.pages.needed(tokens) - len(sequence.pages)
        if missing > self.pages.free:
            return False
        for _ in range(missing):
            sequence.pages.append(self.pages.take())
        return True

    def _preempt(self, spans: dict[Sequence, Span]) -> Sequence:
        """The last one gives its pages back, waits, and will compute again what the cache does not keep until then."""
        sequence = self.running.pop()
        spans.pop(sequence, None)
        self._free(sequence)
        self.counts = self.counts.plus(preempted=1)
        bisect.insort(self.waiting, sequence, key=_order)
        return sequence

    def _free(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        if sequence.row >= 0:
            self._rows.append(sequence.row)
        sequence.pages, sequence.computed, sequence.named, sequence.content = [], 0, 0, ROOT
        sequence.row, sequence.told = -1, 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
