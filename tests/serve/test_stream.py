"""Answers on their way to readers: nothing is lost or waits unseen, whoever reads, however fast."""

from __future__ import annotations

import asyncio
import random
from threading import Event, Thread
from typing import Any

import pytest

from echelon.models.tokenizer import Bytes
from echelon.serve.errors import ApiError
from echelon.serve.jobs import Job
from echelon.serve.request import Logprob, Piece, SamplingParams
from echelon.serve.stream import Stream, collect, wake
from echelon.serve.text import Text

TEXT = Text(Bytes())
END = 0


def opened(answers: int = 1, stop: tuple[str, ...] = ()) -> Stream:
    return Stream((1, 2), SamplingParams(n=answers, stop=stop), TEXT, frozenset({END}), lambda: None)


def add(stream: Stream, text: bytes, index: int = 0) -> None:
    for token in text:
        stream.add(index, token)


def test_a_piece_is_all_that_has_come_since_the_last() -> None:
    stream = opened()
    pieces = iter(stream)
    add(stream, "né".encode()[:2])
    assert next(pieces) == Piece(0, "n", (110, 195))
    add(stream, "né".encode()[2:] + b" an")
    stream.add(0, 100, None, "length")
    assert next(pieces) == Piece(0, "é and", (169, 32, 97, 110, 100), finish="length")
    assert list(pieces) == []


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    stream = opened()
    stream.add(0, 97)
    stream.add(0, END, None, "stop")
    assert list(stream) == [Piece(0, "a", (97, END), finish="stop")]


def test_half_a_character_comes_with_the_end() -> None:
    stream = opened()
    stream.add(0, "é".encode()[0], None, "length")
    assert [piece.text for piece in stream] == ["\N{REPLACEMENT CHARACTER}"]


def test_a_stop_text_is_no_part_of_what_is_read() -> None:
    stream = opened(stop=("nd",))
    add(stream, b"an")
    pieces = iter(stream)
    assert next(pieces).text == "a"
    stream.add(0, 100, None, "stop")
    assert next(pieces) == Piece(0, "", (100,), finish="stop")


def test_several_answers_and_what_was_told_of_them() -> None:
    stream = opened(2)
    add(stream, b"ab", index=1)
    stream.add(0, 99, Logprob(99, -1.0), "length")
    stream.cached = 1
    stream.add(1, 100, Logprob(100, -2.0), "length")
    pieces = list(stream)
    assert [(piece.index, piece.text, piece.finish, piece.cached) for piece in pieces] == [
        (1, "abd", "length", 1),
        (0, "c", "length", 1),
    ]
    answer = collect(stream, pieces)
    assert [choice.text for choice in answer.choices] == ["c", "abd"]
    assert [[each.logprob for each in choice.logprobs] for choice in answer.choices] == [[-1.0], [-2.0]]


def test_what_has_come_is_read_before_a_failure() -> None:
    stream = opened()
    add(stream, b"ab")
    stream.fail(ValueError("gone"))
    pieces = iter(stream)
    assert next(pieces).text == "ab"
    with pytest.raises(ValueError, match="gone"):
        next(pieces)


def test_an_answer_that_was_cancelled_has_ended() -> None:
    stream = opened()
    add(stream, b"ab")
    stream.cut(0)
    assert list(stream) == [Piece(0, "ab", (97, 98), finish="cancelled")]


def test_what_was_kept_back_comes_with_the_cut() -> None:
    stream = opened(stop=("\n\n",))
    add(stream, b"a line\n")
    stream.cut(0)
    assert [piece.text for piece in stream] == ["a line\n"]


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_client_gets_what_had_come_before_it_was_cut_off(prompts: int) -> None:
    streams = [opened(2) for _ in range(prompts)]
    for stream in streams:
        add(stream, b"ab", index=0)
        add(stream, b"cd", index=1)
        stream.cut(0)
        stream.cut(1)
    told: list[str] = []

    async def read() -> None:
        async for _, piece in Job(streams).pieces():
            assert piece.finish is None
            told.append(piece.text)

    with pytest.raises(ApiError):
        asyncio.run(read())
    assert sorted(told) == sorted(["ab", "cd"] * prompts)


def write(streams: list[Stream], tokens: int, chance: random.Random) -> None:
    """As the engine does: a step's tokens for all, then whoever waits is woken."""
    for place in range(tokens):
        finish = "length" if place == tokens - 1 else None
        for stream in streams:
            stream.add(0, 33 + place % 90, None, finish)
        wake(streams)
        if chance.random() < 0.1:
            Event().wait(0.0005)  # so that readers come to an end, too, and must be woken again


EXPECTED = tuple(33 + place % 90 for place in range(400))


@pytest.mark.parametrize("seed", range(3))
def test_readers_in_threads_get_everything(seed: int) -> None:
    streams = [opened() for _ in range(8)]
    found: dict[Stream, list[Piece]] = {}
    readers = [
        Thread(target=lambda each: found.update({each: list(each)}), args=[each], daemon=True) for each in streams
    ]
    for reader in readers:
        reader.start()
    write(streams, len(EXPECTED), random.Random(seed))
    for reader in readers:
        reader.join(20)
    assert len(found) == 8, "somebody waits for ever"
    for pieces in found.values():
        assert tuple(token for piece in pieces for token in piece.tokens) == EXPECTED
        assert "".join(piece.text for piece in pieces) == bytes(EXPECTED).decode()


@pytest.mark.parametrize("seed", range(3))
def test_readers_of_an_event_loop_get_everything(seed: int) -> None:
    streams = [opened() for _ in range(8)]

    async def read(stream: Stream) -> list[Piece]:
        return [piece async for piece in stream]

    async def all_of_them() -> list[list[Piece]]:
        writing = asyncio.to_thread(write, streams, len(EXPECTED), random.Random(seed))
        _, *found = await asyncio.wait_for(asyncio.gather(writing, *map(read, streams)), 20)
        return found

    for pieces in asyncio.run(all_of_them()):
        assert tuple(token for piece in pieces for token in piece.tokens) == EXPECTED
        assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_loop_is_called_once_for_all_of_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, calls = [opened() for _ in range(5)], []

    async def read_one(stream: Stream) -> Piece:
        return await anext(aiter(stream))

    async def main() -> list[Piece]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        reading = [asyncio.ensure_future(read_one(stream)) for stream in streams]
        await asyncio.sleep(0)  # all wait now
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *what: calls.append(what) or call(*what))
        for stream in streams:
            stream.add(0, 97)
        wake(streams)
        assert len(calls) == 1
        return await asyncio.gather(*reading)

    assert [piece.text for piece in asyncio.run(main())] == ["a"] * 5


def test_a_loop_tells_when_its_readers_have_read() -> None:
    streams, told = [opened() for _ in range(3)], list[Any]()

    async def read(stream: Stream) -> None:
        async for piece in stream:
            told.append(piece.text)

    async def read_all() -> None:
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        for finish in (None, "length"):
            await asyncio.sleep(0.01)  # all wait
            for stream in streams:
                stream.add(0, 97, None, finish)
            wake(streams, lambda: told.append("heard"))
        await asyncio.gather(*readers)

    asyncio.run(read_all())
    assert told == ["a", "a", "a", "heard"] * 2


def test_a_reader_whose_loop_is_gone_hurts_nobody() -> None:
    stream = opened()

    async def leave() -> None:
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0)
        reading.cancel()

    asyncio.run(leave())
    stream.add(0, 97)
    wake([stream])
    assert next(iter(stream)).text == "a"
