"""The printed form: OMB's header, columns and widths, so that what reads OMB's output reads this.

Lines of words begin with `#`; a line of figures begins with the size, ten wide, and has columns eighteen wide. Several
contenders have their columns side by side, named after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.bench.result import Result, Row

_SIZE_WIDTH = 10
_WIDTH = 18
_ITERATIONS_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A figure's key, OMB's title for it, the title where several contenders stand side by side, and whether only -f
    shows it.
    """

    key: str
    title: str
    short: str
    full: bool = False


COLUMNS = {
    "latency": (
        Column("latency_us", "Avg Latency(us)", "Avg(us)"),
        Column("min_us", "Min Latency(us)", "Min(us)", full=True),
        Column("max_us", "Max Latency(us)", "Max(us)", full=True),
    ),
    "bandwidth": (Column("mb_per_s", "Bandwidth (MB/s)", "MB/s"),),
    "rate": (Column("mb_per_s", "MB/s", "MB/s"), Column("messages_per_s", "Messages/s", "Messages/s")),
    "overlap": (
        Column("overall_us", "Overall(us)", "Overall(us)"),
        Column("compute_us", "Compute(us)", "Compute(us)"),
        Column("init_us", "Coll. Init(us)", "Init(us)", full=True),
        Column("test_us", "MPI_Test(us)", "Test(us)", full=True),
        Column("wait_us", "MPI_Wait(us)", "Wait(us)", full=True),
        Column("pure_us", "Pure Comm.(us)", "Pure(us)"),
        Column("min_us", "Min Comm.(us)", "Min(us)", full=True),
        Column("max_us", "Max Comm.(us)", "Max(us)", full=True),
        Column("overlap_percent", "Overlap(%)", "Overlap(%)"),
    ),
}


@dataclass(frozen=True, slots=True)
class Table:
    """How one result is printed."""

    result: Result
    sized: bool
    full: bool
    validate: bool

    def header(self, version: str, transports: str, pairs: int | None, window: int) -> Iterator[str]:
        """The lines above the figures."""
        result = self.result
        first = f"# Echelon {transports} {result.title} v{version}"
        if pairs is None:
            yield ""
            yield first
        else:  # OMB's mbw_mr begins without an empty line, and tells its pairs
            yield first
            yield f"# [ pairs: {pairs} ] [ window size: {window} ]"
        if result.columns == "overlap":
            yield "# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait"
            yield ""
        if len(result.contenders) > 1:
            yield from (f"# {label}: {words}." for label, words in result.contenders.items())
        if self.sized:
            yield f"# Datatype: {result.datatype}."
        yield self._titles()

    def line(self, row: Row) -> str:
        cells = [f"{row.figures[label][column.key]:{width}.2f}" for label, column, width in self._columns()]
        if self._shows_iterations:
            cells.append(f"{row.iterations:{_ITERATIONS_WIDTH}d}")
        if self.validate:
            cells += [f"{'Pass' if row.valid[label] else 'Fail':>{_WIDTH}}" for label in self.result.contenders]
        return (f"{row.size:<{_SIZE_WIDTH}d}" if self.sized else "") + "".join(cells)

    def _titles(self) -> str:
        text = f"{'# Size':<{_SIZE_WIDTH}}" if self.sized else ""
        for label, column, width in self._columns():
            title = self._title(label, column)
            text += f"{title:>{width}}" if text else f"# {title}".rjust(width)
        if self._shows_iterations:
            text += f"{'Iterations':>{_ITERATIONS_WIDTH}}"
        if self.validate:
            text += "".join(
                f"{'Validation' if self._alone else f'{label} valid':>{_WIDTH}}" for label in self.result.contenders
            )
        return text

    @property
    def _alone(self) -> bool:
        return len(self.result.contenders) == 1

    @property
    def _shows_iterations(self) -> bool:
        return self.full and self.result.columns == "latency"

    def _title(self, label: str, column: Column) -> str:
        return column.title if self._alone else f"{label} {column.short}"

    def _columns(self) -> Iterator[tuple[str, Column, int]]:
        first = not self.sized
        for label in self.result.contenders:
            for column in COLUMNS[self.result.columns]:
                if self.full or not column.full:
                    title = self._title(label, column)
                    width = max(_WIDTH, len(title) + 2)
                    if first:  # without a size, OMB's first column is as wide as its title with the mark
                        width = len(f"# {title}")
                    yield label, column, width
                    first = False
