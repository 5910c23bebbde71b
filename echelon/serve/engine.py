"""The engine: one loop that never ends, in whose every step all live requests share, whatever their age.

    engine = Engine(model)
    answers = engine.generate(["Once upon a time"], SamplingParams(max_tokens=64))
    async for piece in engine.stream("Once upon a time", SamplingParams(max_tokens=64)): ...

A request enters at the next step, and leaves in the step in which it ends or after which nobody wants it any more. The
loop is a thread's; requests may come from any other. What the loop shares with them (the scheduler's lists) it touches
only under a lock, and never while a step is computed.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.models import counter
from echelon.models.tokenizer import Bytes
from echelon.serve import memory, way
from echelon.serve.cache import Pages
from echelon.serve.metrics import Metrics
from echelon.serve.request import Answer, BadRequest, EngineFailed, Finish, Logprob, Piece, Refused, SamplingParams
from echelon.serve.runner import Runner, undisturbed
from echelon.serve.sample import Chosen, Draw, Draws
from echelon.serve.scheduler import Scheduler, Span
from echelon.serve.scheduler import Sequence as Scheduled
from echelon.serve.settings import Settings
from echelon.serve.slo import Pacer
from echelon.serve.stream import Stream, collect, wake
from echelon.serve.text import Text, Writer

_AT_EXIT_SECONDS = 5.0  # for the step that is being computed
_REST_SECONDS = 1.0  # without anything to do, after which other ranks need not look for it

Prompt = str | Sequence[int]
_USUAL = SamplingParams()


class _Writing:
    """One answer of a request, while it is written."""

    def __init__(self, stream: Stream, index: int, key: tuple[int, int], limit: int, priority: int, text: Text) -> None:
        self.stream, self.index = stream, index
        self.sequence = Scheduled(list(stream.prompt), limit, priority)
        params = stream.params
        self.draw = Draw(params, key, self.sequence.tokens, self.sequence.prompt)
        self.writer = Writer(text, params.stop, stream.prompt) if params.stop else None  # which looks for stop texts
        self.generated = 0  # tokens
        self.limit = limit - self.sequence.prompt  # of them
        self.arrived = self.last_token = time.perf_counter()
        self.has_ended = False


class _Flight(NamedTuple):
    """A step that is under way: its spans, and whose next tokens it draws."""

    spans: list[Span]
    last: list[_Writing]
    chosen: Chosen
    began: float
    can_be_followed: bool  # by a step that is launched before this one's tokens are known


class Engine:
    """Serves one model, until it is closed: `with Engine(model) as engine`. With tensor parallelism it is made on the
    first rank of `group`; the others make a Runner with the same arguments and `follow`.
    """

    def __init__(
        self,
        model: Any,
        text: Text | None = None,
        settings: Settings | None = None,
        *,
        name: str = "model",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings = (settings or Settings()).on(next(model.parameters()).device)
        self.name, self.text = name, text or Text(Bytes())
        self.metrics = Metrics()
        self.failed: BaseException | None = None
        learned = getattr(model, "positions", None) is not None
        if learned and settings.context > model.config.context:
            raise ValueError(
                f"context={settings.context}, but the model has learned positions for {model.config.context} tokens: "
                f"at most that"
            )
        shape = memory.shape(model, settings, group)
        self._runner = Runner(model, shape, settings, group=group)
        self.context = memory.context(model, settings, shape.pages)
        made_for = f" (the model was made for {model.config.context:,})" if self.context > model.config.context else ""
        self.how = (
            f"{way.device_text(model)}; {self._runner.choice}{', reproducible' if settings.reproducible else ''}; "
            f"{shape.pages:,} pages of {shape.page_size} tokens "
            f"({memory.text(shape.pages * memory.page_bytes(model, shape.page_size))}), {self.context:,} tokens of "
            f"context{made_for}; {settings.most_running} requests and {settings.token_budget:,} tokens in a step"
            f"{'' if settings.slo is None else f'; promised: {settings.slo}'}"
        )
        self._vocabulary = int(model.config.vocabulary)
        self._pacer = None if settings.slo is None else Pacer(settings.slo, settings.token_budget)
        self._scheduler = Scheduler(
            Pages(shape.pages, settings.page_size),
            budget=settings.token_budget,
            most_running=settings.most_running,
            pace=self._pacer,
        )
        self._writing: dict[Scheduled, _Writing] = {}
        self._later: dict[Stream, list[_Writing]] = {}  # further answers: they begin when the first has read the prompt
        self._changed = threading.Condition()
        self._landed: float | None = None  # when the last step did, if another follows at once
        self._draws = Draws()  # of the last step
        self._is_draining = self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self._stop, _AT_EXIT_SECONDS)  # a thread that computes while Python ends is in its way

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = _USUAL
    ) -> list[Answer]:
        """The answers to all prompts, in their order; waits for them."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        streams: list[Stream] = []
        try:
            for prompt, how in zip(prompts, each, strict=True):
                streams.append(self.open(prompt, how, wait=True))
            return [collect(stream, list(stream)) for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

    async def stream(self, prompt: Prompt, params: SamplingParams = _USUAL, priority: int = 0) -> AsyncIterator[Piece]:
        """The pieces of an answer; closing the iterator cancels the request."""
        stream = self.open(prompt, params, priority)
        try:
            async for piece in stream:
                yield piece
        finally:
            stream.cancel()

    def open(self, prompt: Prompt, params: SamplingParams, priority: int = 0, *, wait: bool = False) -> Stream:
        """Begin a request, from any thread; what cannot be answered is refused here, before anything is computed.
        `wait` until the queue has room instead.
        """
        tokens = self._tokens(prompt)
        most = self.context - len(tokens)
        if most < 1:
            raise BadRequest(
                f"the prompt has {len(tokens)} tokens, but with its answer it may have {self.context}: shorten it",
                "prompt",
            )
        if params.max_tokens is not None and params.max_tokens > most:
            raise BadRequest(
                f"the prompt's {len(tokens)} tokens and max_tokens={params.max_tokens} are more than {self.context}: "
                f"lower max_tokens to {most}, or shorten the prompt",
                "max_tokens",
            )
        limit = len(tokens) + (most if params.max_tokens is None else params.max_tokens)
        ends = frozenset[int]() if params.ignore_eos else self.text.ends
        stream = Stream(tuple(tokens), params, self.text, ends, self._notify)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        writings = [
            _Writing(stream, index, counter.name_key(seed, str(index)), limit, priority, self.text)
            for index in range(params.n)
        ]
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._has_room() or self._is_over())
            self._refuse(len(tokens))
            self._begin(writings[0])
            if writings[1:]:
                self._later[stream] = writings[1:]
            self._changed.notify_all()
        self.metrics.arrived(len(tokens))
        return stream

    def drain(self) -> None:
        """Take no more requests, and return when all have ended."""
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: self.failed or not (self._writing or self._later))

    def close(self) -> None:
        """End the loop, and what is still being answered."""
        self._stop()
        atexit.unregister(self._stop)

    def _stop(self, seconds: float | None = None) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _tokens(self, prompt: Prompt) -> list[int]:
        tokens = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(token, int) and 0 <= token < self._vocabulary for token in tokens):
            raise BadRequest(f"a prompt's tokens must be numbers from 0 to {self._vocabulary - 1}", "prompt")
        if not tokens:
            raise BadRequest("the prompt is empty: it needs at least one token", "prompt")
        return tokens

    def _is_over(self) -> bool:
        return self.failed is not None or self._is_draining or self._is_closing

    def _has_room(self) -> bool:
        return len(self._scheduler.waiting) < self.settings.most_waiting

    def _refuse(self, tokens: int) -> None:
        """What comes now, if it cannot be answered, or not in time."""
        if self.failed is not None:
            raise self._failure()
        if self._is_draining or self._is_closing:
            raise Refused("the engine is being shut down")
        scheduler = self._scheduler
        why = ""
        if not self._has_room():
            why = f"{len(scheduler.waiting)} requests are waiting already: ask again later"
        elif self._pacer is not None and (scheduler.running or scheduler.waiting):  # alone it is as fast as can be
            ahead = tokens + sum(each.left for each in (*scheduler.running, *scheduler.waiting) if each.left > 1)
            if not self._pacer.can_promise(ahead, len(scheduler.running), len(scheduler.waiting)):
                why = f"the first token would come later than the {self._pacer.slo.ttft:g} s that are promised"
        if why:
            self.metrics.refused()
            raise Refused(why)

    def _begin(self, writing: _Writing) -> None:
        self._writing[writing.sequence] = writing
        self._scheduler.add(writing.sequence)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _loop(self) -> None:
        """A step is launched before the one before it is landed, so that the device need not wait for this thread."""
        flight: _Flight | None = None
        try:
            with undisturbed():
                self._runner.warm()
                while self._wait(flight is not None):
                    following = self._launch() if flight is None or flight.can_be_followed else None
                    if flight is not None:
                        self._land(flight)
                    flight = following
            self._runner.end()
        except BaseException as error:
            self.failed = error
        with self._changed:
            streams = {id(each.stream): each.stream for each in self._writing.values()}
            self._writing.clear()
            self._later.clear()
            self._changed.notify_all()
        for stream in streams.values():
            stream.fail(self._failure())
        wake(streams.values())

    def _failure(self) -> EngineFailed:
        failure = EngineFailed(f"the engine has failed: {self.failed}" if self.failed else "the engine was closed")
        failure.__cause__ = self.failed
        return failure

    def _wait(self, flying: bool) -> bool:
        """Until there is something to compute, or to land; false when the engine shall end."""
        with self._changed:
            while not self._is_closing:
                self._leave_cancelled()
                if self._writing or flying:
                    return True
                self._landed = None
                if self._pacer is not None:
                    self._pacer.pause()
                if not self._changed.wait(_REST_SECONDS):
                    self._runner.rest()
        return False

    def _leave_cancelled(self) -> None:
        cancelled = [each for each in self._writing.values() if each.stream.is_cancelled]
        try:
            for writing in cancelled:
                for further in self._later.pop(writing.stream, []):
                    writing.stream.cut(further.index)
                self._end(writing, "cancelled")
                writing.stream.cut(writing.index)
        finally:
            wake(writing.stream for writing in cancelled)
        if cancelled:
            self._changed.notify_all()
            self._report(tokens=0, seconds=0.0)

    def _launch(self) -> _Flight | None:
        """Begin the next step, if there is something that it can compute."""
        began = time.perf_counter()
        scheduler = self._scheduler
        with self._changed:
            before = scheduler.counts
            spans = scheduler.schedule()
            preempted, asked, found = (new - old for new, old in zip(scheduler.counts, before, strict=True))
            parts = [span.part() for span in spans]
            last = [self._writing[span.sequence] for span in spans if span.is_last]
        self.metrics.preempted(preempted)
        self.metrics.prefix(asked, found)
        if not spans:
            return None
        draws = [writing.draw for writing in last]
        if draws != self._draws.each:
            self._draws = Draws(draws)
        chosen = self._runner.launch(parts, self._draws)
        can_be_followed = self._runner.choice.ahead and not self._draws.look_back
        with self._changed:
            scheduler.advance(spans)
        return _Flight(spans, last, chosen, began, can_be_followed)

    def _land(self, flight: _Flight) -> None:
        """Wait for a step's tokens, and give them to those who still want them."""
        tokens, logprobs = flight.chosen.result()
        now = time.perf_counter()
        follows = self._landed is not None
        answering = sum(span.answers for span in flight.spans)
        reading = sum(span.count for span in flight.spans) - answering
        seconds = now - (self._landed or flight.began)  # whoever answers waits from one token to the next
        self._landed = now
        told = None
        try:
            with self._changed:
                waits = Counter(now - each.last_token for each in flight.last if each.generated and not each.has_ended)
                for wait, count in waits.items():
                    self.metrics.next_token(wait, count)
                for place, (writing, token) in enumerate(zip(flight.last, tokens, strict=True)):
                    if writing.has_ended:
                        continue
                    self._scheduler.settle(writing.sequence, token)
                    self._take(writing, token, None if logprobs is None else logprobs[place], now)
                self._changed.notify_all()  # those who wait for room, or for the end
                if self._pacer is not None:
                    expected = self._pacer.expected(answering, reading)
                    told = partial(self._heard, expected if answering and follows else None)
                    self._pacer.took(answering, reading, seconds)
                self._report(answering + reading, seconds)
        finally:
            wake((writing.stream for writing in flight.last), told)

    def _heard(self, expected: float | None) -> None:
        """Those who read in an event loop have read what came of a step; see `Pacer.heard`."""
        assert self._pacer is not None
        self._pacer.heard(expected, time.perf_counter())

    def _report(self, tokens: int, seconds: float) -> None:
        running, waiting, pages = self._scheduler.running, self._scheduler.waiting, self._scheduler.pages
        self.metrics.step(len(running), len(waiting), pages.used, pages.count, tokens, seconds)

    def _take(self, writing: _Writing, token: int, logprob: Logprob | None, now: float) -> None:
        """The next token of an answer."""
        stream = writing.stream
        if not writing.generated:
            self.metrics.first_token(now - writing.arrived)
            stream.cached = max(stream.cached, writing.sequence.cached or 0)
            for further in self._later.pop(stream, []):
                self._begin(further)
        writing.last_token = now
        writing.generated += 1
        ends = token in stream.ends
        if writing.writer is not None and not ends:
            writing.writer.write([token])
            ends = writing.writer.stopped
        finish: Finish | None = "stop" if ends else "length" if writing.generated >= writing.limit else None
        if finish is not None:
            self._end(writing, finish)
        stream.add(writing.index, token, logprob, finish)

    def _end(self, writing: _Writing, finish: Finish) -> None:
        writing.has_ended = True
        self._scheduler.remove(writing.sequence)
        now = time.perf_counter()
        if self._pacer is not None:
            self._pacer.ended(now)
        prompt = writing.sequence.prompt if writing.index == 0 else None  # of all answers
        self.metrics.finished(finish, now - writing.arrived, prompt, writing.generated)
        del self._writing[writing.sequence]  # last: whom the engine still knows it tells if it fails
