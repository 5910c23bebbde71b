"""What a run says of itself while it goes on: its metrics, as they are written, on the terminal of who started it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from echelon.train.line import describe
from echelon.train.rows import decode

_INTERVAL = 0.25  # seconds


class Follower:
    """As a context: a bar on a terminal, a line for each row elsewhere."""

    def __init__(self, metrics: Path, steps: int) -> None:
        self._metrics, self._steps = metrics, steps
        self._console = Console()
        self._read, self._file = 0, 0
        self._latest = time.time()  # what is older was shown when it was new
        self._step = ""  # the last, on a terminal: it stays when the bar goes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="echelon-follow", daemon=True)
        self._progress = Progress(
            BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"), console=self._console, transient=True
        )
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> Follower:
        if self._console.is_terminal:
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._progress.stop()
        if self._step:
            self._console.print(self._step, highlight=False, markup=False, soft_wrap=True)

    def _follow(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._show()
        self._show()

    def _show(self) -> None:
        for row in self._rows():
            text = describe(row, self._steps)
            if row["kind"] == "step" and self._console.is_terminal:
                self._step = text
                self._progress.update(self._task, completed=row["step"], description=text)
            else:
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _rows(self) -> list[dict[str, Any]]:
        """The rows that are new. A run that is taken up again writes its metrics anew, without what it will repeat."""
        if not self._metrics.exists():
            return []
        if (number := self._metrics.stat().st_ino) != self._file:
            self._file, self._read = number, 0
        with self._metrics.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        rows = [row for row in decode(whole) if row.get("time", 0.0) > self._latest]
        self._latest = max([self._latest, *(row["time"] for row in rows)])
        return rows
