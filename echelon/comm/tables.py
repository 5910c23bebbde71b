"""Tables of routes on disk, and which of them is in force: what `ECHELON_ROUTE` says.

A name is a road for everything, a path a table's file, `auto` the newest table that `echelon tune` has measured on this
machine, with this MPI, for groups such as the world is. A table from elsewhere is used, with a warning. Needs no
PyTorch, so that whoever starts ranks can look first.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.comm.routes import TRANSPORTS, NoRoute, Place, Road, Table
from echelon.launch.identity import identity
from echelon.launch.start import LINK_VARIABLE

if TYPE_CHECKING:
    from echelon.comm.transports import Transport

VARIABLE = "ECHELON_ROUTE"
AUTO = "auto"


def asked() -> Table | None:
    """The table that the environment asks for; none for `auto`, which is found when the world has met."""
    text = os.environ.get(VARIABLE, "")
    if text == AUTO:
        return None
    if not text:
        return Table()
    if text.partition("+")[0] in TRANSPORTS:
        return Table(everywhere=Road.parse(text))
    if not Path(text).exists():
        raise NoRoute(f"{VARIABLE}={text} is no road ({', '.join(TRANSPORTS)}, …), no table's file and not {AUTO}")
    return read(Path(text))


@cache
def warn_of_elsewhere(table: Table) -> None:
    """Once, if it was measured on another machine, or over another MPI (which runs by now)."""
    measured = table.about.get("machine")
    if measured is None or identity().rank:
        return
    here = fingerprint()
    if names := [name for name in here if measured.get(name) != here[name]]:
        differs = ", ".join(f"{name} {measured.get(name)!r}, here {here[name]!r}" for name in names)
        _warn(f"the table of routes was measured elsewhere ({differs}): `echelon tune` measures one here")


def agreed(transport: Transport, place: Place, known: list[Table]) -> Table:
    """For `auto`: what the group's first rank knows, or finds. It tells all others, whose disks may differ.

    Not through the store, whose server ends with its rank, also while others still read there.
    """
    from echelon.comm.transports import show

    words = (known[0] if known else newest(place)).to_text() if transport.rank == 0 else ""
    known[:] = [Table.from_text(show(transport, words)[0])]
    return known[0]


def newest(place: Place) -> Table:
    """The newest table of this machine for a world such as this one, or the default."""
    found = [(table.about.get("date", ""), path, table) for path, table in _kept() if _fits(table, place)]
    if not found:
        _warn(
            f"{VARIABLE}={AUTO}: no table of this machine is for {place.ranks} ranks on {place.nodes} "
            f"node{'s'[: place.nodes > 1]}; `echelon tune -n {place.ranks}` makes one. Routes are the default ones"
        )
        return Table()
    return max(found, key=lambda entry: entry[:2])[2]


def read(path: Path) -> Table:
    try:
        return Table.from_text(path.read_text())
    except (NoRoute, OSError, UnicodeDecodeError) as error:
        raise NoRoute(f"{path} cannot be read as a table of routes: {error}") from None


def folder() -> Path:
    """Where `echelon tune` keeps what it has measured, for `auto`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "echelon" / "routes"


def fingerprint() -> dict[str, Any]:
    """What the times of a table depend on, beside the ranks: the processor, the MPI, the links between nodes."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "mpi": _mpi(),
        "links": os.environ.get(LINK_VARIABLE, ""),
    }


def _fits(table: Table, place: Place) -> bool:
    shapes = {(rule.ranks, rule.nodes) for rule in table.rules}
    return table.about.get("machine") == fingerprint() and (place.ranks, place.nodes) in shapes


def _kept() -> Iterator[tuple[str, Table]]:
    for path in sorted(folder().glob("*.json")) if folder().is_dir() else ():
        try:
            yield path.name, read(path)
        except NoRoute as error:
            _warn(str(error))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _mpi() -> str:
    if not identity().in_mpi_world:
        return ""
    from echelon.comm.world import library_name, load

    return library_name(load())


def _warn(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
