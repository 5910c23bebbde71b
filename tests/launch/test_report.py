"""Logbook, watch and report, without ranks: what is written can be read, and what is read is told right."""

from __future__ import annotations

import socket
import time

import pytest

from echelon.launch.logbook import _HEADER, COUNT, ELEMENTS, KEPT, LAST, SEQUENCE, Logbook, Message, RankState, read
from echelon.launch.report import account, exit_code, never_comes, never_completes, post_mortem, ranks_text, timed_out
from echelon.launch.watch import Line, Sight, Watch


def book(rank: int, operation: str, sequence: int, *, under_way: bool, size: int = 3, file=None) -> Logbook:
    """A logbook of a rank that did `sequence` operations in the world, the last of them `operation`."""
    logbook = Logbook(rank, file)
    row = logbook.open_row("0", list(range(size)), 60)
    logbook.describe_row(row, dimension="default_pg")
    logbook.rows[row + LAST + sequence % KEPT] = logbook.code(operation, "torch.float32") + under_way
    logbook.rows[row + ELEMENTS] = 1024
    logbook.rows[row + COUNT] = next(logbook.count)
    logbook.rows[row + SEQUENCE] = sequence
    return logbook


def sight(*books: Logbook, fallen: tuple[int, ...] = (), failure: str = "") -> Sight:
    states = [RankState.of(logbook.snapshot()) for logbook in books]
    return Sight({state.rank: state for state in states}, list(fallen), failure)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([0, 1, 2, 5, 7, 8], "ranks 0–2, 5, 7, 8")]
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


def test_logbook_outlives_its_writer(tmp_path):
    logbook = book(2, "all_reduce", 12, under_way=True, file=tmp_path / "2")
    logbook.note_messages({0: Message(7, "a message from rank 1", 1)})
    logbook.end("raised ValueError: x", 1)
    snapshot = read(tmp_path / "2")
    assert snapshot == logbook.snapshot()
    state = RankState.of(snapshot)
    [group] = state.groups
    assert (state.rank, state.ending, state.code) == (2, "raised ValueError: x", 1)
    assert (group.sequence, group.under_way, group.operation, group.elements) == (
        12,
        True,
        "all_reduce of float32",
        1024,
    )
    assert group.message == Message(7, "a message from rank 1", 1)


def test_unreadable_logbook(tmp_path):
    (tmp_path / "0").write_bytes(b"torn")
    assert read(tmp_path / "0") is None
    assert read(tmp_path / "1") is None


def test_rows_are_used_again_and_names_told_apart():
    logbook = Logbook(0)
    first = logbook.open_row("0", [0, 1], 60)
    logbook.rows[first + SEQUENCE] = 5
    logbook.close_row(first)
    assert logbook.open_row("0", [0, 1], 60) == first
    groups = RankState.of(logbook.snapshot()).groups
    assert [(group.name, group.sequence) for group in groups] == [("0 (made anew, 2)", 0), ("0", 5)]


def test_what_was_done_before_a_destroy_counts():
    """A rank that did its part, destroyed the group and ended is not missing."""
    waiting, done = book(0, "gather", 12, under_way=True), book(1, "gather", 12, under_way=False)
    done.close_row(0)
    done.end("ended", 0)
    others = book(2, "gather", 12, under_way=True)
    [group] = RankState.of(waiting.snapshot()).groups
    assert never_completes(group, sight(waiting, done, others)) == ""
    assert "rank 1: ended, last in gather of float32 × 1,024 (number 12)" in account(sight(done))


@pytest.mark.parametrize("ranks", [[0], [3, 7], list(range(1024)), [0, 2, 4, 6], [0, 1, 5, 9, 13, 14], [5, 3, 1]])
def test_ranks_are_kept_whole(ranks):
    logbook = Logbook(0)
    logbook.open_row("0", ranks, 60)
    assert RankState.of(logbook.snapshot()).groups[0].ranks == ranks


@pytest.mark.parametrize("lack", ["rows", "bytes"])
def test_a_full_book_leaves_groups_out(monkeypatch, lack):
    if lack == "bytes":
        monkeypatch.setattr("echelon.launch.logbook._BYTES", _HEADER + 4096)
    logbook = Logbook(0)
    if lack == "rows":
        del logbook._free[:-5]
    rows = [logbook.open_row(str(number), [n * n for n in range(50)], 60) for number in range(20)]
    logbook.describe_row(rows[-1], dimension="mesh_dp")
    assert 0 < len(RankState.of(logbook.snapshot()).groups) < 20
    for row in rows:
        logbook.close_row(row)
    logbook.open_row("again", [0, 1], 60)
    assert RankState.of(logbook.snapshot()).groups[0].name == "again"


def test_waiting_for_the_dead_and_the_ended():
    waiting = book(0, "all_reduce", 12, under_way=True)
    behind = book(1, "broadcast", 11, under_way=False)
    arrived = book(2, "all_reduce", 12, under_way=False)
    arrived.end("ended", 0)  # it did its part before
    [group] = RankState.of(waiting.snapshot()).groups
    words = "all_reduce of float32 × 1,024 (number 12) in the world"
    assert never_completes(group, sight(waiting, behind, arrived)) == ""
    assert (
        timed_out(group, sight(waiting, behind, arrived))
        == f"{words} was not complete after the timeout of 60 s: rank 1 had not arrived"
    )
    assert never_completes(group, sight(waiting, behind, arrived, fallen=(1,))) == (
        f"{words} can never complete: rank 1 died without a word (killed, or crashed)"
    )
    behind.end("ended", 0)
    assert never_completes(group, sight(waiting, behind, arrived)) == f"{words} can never complete: rank 1 ended"


def test_mismatch():
    books = [book(0, "all_reduce", 12, under_way=True), book(1, "barrier", 12, under_way=True)]
    [group] = RankState.of(books[0].snapshot()).groups
    assert never_completes(group, sight(*books)) == (
        "the ranks' calls do not match: number 12 in the world is all_reduce of float32 on rank 0, "
        "barrier of float32 on rank 1"
    )
    finished = book(1, "barrier", 12, under_way=False)
    assert never_completes(group, sight(books[0], finished)) == ""


def test_mismatch_that_some_have_passed():
    """Rank 0 is stuck in number 12; for the others that was something else, and they went on."""
    stuck = book(0, "all_reduce", 12, under_way=True)
    further = [book(rank, "reduce_scatter", 15, under_way=True) for rank in (1, 2)]
    for logbook in further:
        for number in range(8, 15):
            name = "barrier" if number == 12 else "all_reduce"
            logbook.rows[LAST + number % KEPT] = logbook.code(name, "torch.float32")
    seen = sight(stuck, *further)
    for state in seen.states.values():
        assert never_completes(state.groups[0], seen) == (
            "the ranks' calls do not match: number 12 in the world is all_reduce of float32 on rank 0, "
            "barrier of float32 on ranks 1, 2"
        )
    ahead = [book(rank, "reduce_scatter", 30, under_way=True) for rank in (1, 2)]  # too far to know
    assert never_completes(RankState.of(stuck.snapshot()).groups[0], sight(stuck, *ahead)) == ""


def test_groups_are_named_by_their_dimension():
    logbook = Logbook(1)
    row = logbook.open_row("7", [1, 3], 60)
    logbook.describe_row(row, dimension="mesh_dp")
    logbook.rows[row + LAST + 4] = logbook.code("all_gather", "torch.bfloat16") + 1
    logbook.rows[row + SEQUENCE] = 4
    [group] = RankState.of(logbook.snapshot()).groups
    assert timed_out(group, sight(logbook)) == (
        "all_gather of bfloat16 (number 4) in dimension dp (ranks 1, 3) was not complete after the timeout of 60 s: "
        "rank 3 had not arrived"
    )


def test_messages():
    logbook = book(0, "barrier", 3, under_way=False)
    logbook.note_messages({0: Message(1, "a message from any rank", None)})
    [group] = RankState.of(logbook.snapshot()).groups
    assert never_comes(group, 0, sight(logbook, fallen=(1,))) == ""  # rank 2 may still send it
    assert "ranks 1, 2 died" in never_comes(group, 0, sight(logbook, fallen=(1, 2)))


def test_account_and_exit_code():
    books = [book(0, "all_reduce", 12, under_way=True), book(1, "barrier", 11, under_way=False)]
    books += [book(2, "all_reduce", 12, under_way=True)]
    killed = sight(*books, fallen=(1, 0, 2))
    assert exit_code(killed, 9) == 9
    assert exit_code(killed, 0) == 1  # somebody waited for the one that vanished
    assert post_mortem(killed, 9).splitlines() == [
        "rank 1 died without a word (killed, or crashed); exit code 9",
        "  ranks 0, 2: waiting in all_reduce of float32 × 1,024 (number 12) in the world",
        "  rank 1: died, last in barrier of float32 × 1,024 (number 11) in the world",
    ]
    books[1].end("exited with code 7", 7)
    assert exit_code(sight(*books, fallen=(1, 0)), 9) == 7
    assert exit_code(sight(*books, fallen=(1, 0), failure="x"), 9) == 7
    assert exit_code(sight(*books, failure="x"), 9) == 1
    at_once = [book(rank, "barrier", 3, under_way=False) for rank in range(3)]
    assert exit_code(sight(*at_once, fallen=(0, 1, 2)), 0) == 0  # all left by os._exit, their work done
    assert "ranks 0–2: in no operation" in account(sight(*at_once))


def test_watch(tmp_path):
    watch = Watch(tmp_path)
    watch.start()
    books = [book(rank, "barrier", rank, under_way=False, file=tmp_path / str(rank)) for rank in range(3)]
    lines = [Line(watch.address, rank) for rank in range(3)]
    for line, logbook in zip(lines, books, strict=True):
        line.tell(logbook.snapshot())
    assert until(lambda: sorted(lines[0].ask().states) == [0, 1, 2])
    books[2].end("ended", 0)
    lines[2].leave(books[2].snapshot())
    lines[2].hang_up()
    lines[1].hang_up()  # as a killed process would
    assert until(lambda: lines[0].ask().fallen == [1])
    books[1].rows[0] = 41  # after its last word
    assert watch.sight().states[1].groups[0].sequence == 41
    assert lines[0].fail("first")
    assert not lines[0].fail("second")
    watch.close()
    assert watch.sight().failure == "first"


def test_strangers_are_sent_away():
    watch = Watch()
    watch.start()
    host, port, _token = watch.address.split(":")
    for words in (
        b'{"token": "wrong", "rank": 0, "ask": true}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"rank": 0}\n',
        b"[" * 900 + b"\n",
        b"x" * 5000,
    ):
        with socket.create_connection((host, int(port)), 5) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    watch.close()
    assert watch.sight() == Sight({}, [])


def until(condition) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
