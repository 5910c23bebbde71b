"""Runs tests of the suite on started ranks, and says how each ended. A hang costs its ranks and nothing else."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.conformance import suite
from tests.pool import Pool, RankError

TEST_SECONDS = 120
HUNG = "hung"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended: `passed`, `skipped: …`, `failed: …` or `hung`; with all that is known of a failure."""

    summary: str
    details: str = ""
    seconds: float = 0

    @property
    def kind(self) -> str:
        return self.summary.partition(":")[0]


class Harness:
    """`size` ranks for the tests, started when first used, and again after a failure.

    The tests are those of PyTorch's suite for backends, unless given other functions that list and run tests.
    """

    def __init__(
        self,
        size: int,
        test_names: Callable[..., list[str]] = suite.test_names,
        run_test: Callable[[str, str, str, float], str] = suite.run_test,
    ) -> None:
        self.size = size
        self._test_names = test_names
        self._run_test = run_test
        self._pool = Pool(size)
        self._directory = Path(tempfile.mkdtemp(prefix="conformance-"))
        self._runs = 0

    def names(self, *arguments: str) -> list[str]:
        """Every test of the suite."""
        names: list[str] = self._pool.run(self._test_names, *arguments, timeout=TEST_SECONDS)[0]
        return names

    def run(self, name: str, backend: str, seconds: float = TEST_SECONDS) -> Outcome:
        """Run one test over a backend."""
        self._runs += 1
        directory = self._directory / str(self._runs)
        directory.mkdir()
        suite.prepare(directory)
        begin = monotonic()
        try:
            answers = self._pool.run(self._run_test, name, backend, str(directory), 0.8 * seconds, timeout=seconds)
        except RankError as error:
            return self._failure(str(error), directory, monotonic() - begin)
        # A test may skip on some ranks only; it has then run on the others.
        ran = [answer for answer in answers if answer == suite.PASSED]
        return Outcome((ran or answers)[0], seconds=monotonic() - begin)

    def close(self) -> None:
        """End the ranks and forget what they wrote."""
        self._pool.stop()
        shutil.rmtree(self._directory)

    def _failure(self, text: str, directory: Path, seconds: float) -> Outcome:
        logs = [path.read_text(errors="replace") for path in sorted(directory.glob("*.log"))]
        details = "\n".join([text, *(f"rank {rank} wrote:\n{log}" for rank, log in enumerate(logs))])
        if "Traceback" not in text and "died" not in text:
            return Outcome(HUNG, details, seconds)
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*", text, re.MULTILINE)
        return Outcome(f"{FAILED}: {raised[-1] if raised else text}", details, seconds)
