"""Five thousand requests over HTTP, some of whose clients leave early: memory stays flat, and nothing is left."""

from __future__ import annotations

import json
import random
import threading
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlparse

import pytest

from tests.serve.served import MODEL, Served, served, tiny_engine, until

REQUESTS, CLIENTS = 5000, 8


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def ask(server: Served, client: int, count: int) -> None:
    """One client's requests: short and long, streamed and not; every tenth is left before its end."""
    chance = random.Random(client)
    place = urlparse(server.url)
    for number in range(count):
        leaves = chance.random() < 0.1
        body = {
            "model": MODEL,
            "prompt": [chance.randrange(256) for _ in range(chance.choice([1, 20, 200]))],
            "max_tokens": 300 if leaves else chance.randint(1, 12),
            "stream": leaves or chance.random() < 0.5,
            "ignore_eos": True,
            "n": chance.choice([1, 1, 1, 2]),
        }
        connection = HTTPConnection(str(place.hostname), place.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, (number, answer.read())
        if leaves:
            answer.read(1)
        else:
            assert answer.read()
        connection.close()


@pytest.mark.slow
def test_five_thousand_requests() -> None:
    with served(tiny_engine(most_running=16)) as server:
        held = []
        failures: list[BaseException] = []

        def client(number: int, count: int) -> None:
            try:
                ask(server, number, count)
            except BaseException as error:
                failures.append(error)

        for part in range(5):
            threads = [
                threading.Thread(target=client, args=(CLIENTS * part + each, REQUESTS // CLIENTS // 5))
                for each in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures[0]
            until(lambda: server.live()["running"] == 0)
            held.append(resident_mib())
        assert server.live()["kv_usage"] == 0
        assert sum(server.live()["finished"].values()) >= REQUESTS
        assert held[-1] - held[1] < 16, held
