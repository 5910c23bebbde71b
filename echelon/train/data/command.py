"""The commands `echelon data prepare`, `echelon data show` and `echelon data pathology`.

What does the work is imported when a command runs, since every other command imports this module too.
"""

from __future__ import annotations

import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from echelon.launch.say import fail, say
from echelon.train.data.errors import DataError

if TYPE_CHECKING:
    from echelon.train.data.documents import Documents

data_app = typer.Typer(
    help="Prepare files of tokens, look into them, and make images to try things out.", no_args_is_help=True
)
_SHOWN = 200  # tokens


class Kind(StrEnum):
    text = "text"
    datasets = "datasets"


class Set(StrEnum):
    classes = "classes"
    masks = "masks"


class Dtype(StrEnum):
    auto = "auto"
    uint16 = "uint16"
    uint32 = "uint32"


@data_app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Text files, folders, patterns; `python`: its standard library.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The file to write: NAME.bin, with NAME.json beside it.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizer.json, or a folder that has one.")] = "bytes",
    kind: Annotated[Kind, typer.Option(help="`datasets`: the input is one of Hugging Face's.")] = Kind.text,
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "train",
    column: Annotated[str, typer.Option(help="Of a dataset: the one with the text.")] = "text",
    workers: Annotated[
        Optional[int],
        typer.Option(min=1, help="Processes that tokenise (default: up to one a core).", show_default=False),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of a token; auto: the smallest that the vocabulary fits.")] = Dtype.auto,
) -> None:
    """Turn text into a file of tokens, in parallel. The file is the same whatever the number of workers."""
    from echelon.train.data.documents import progress
    from echelon.train.data.prepare import fitting_dtype, refuse_what_is_no_token_file, useful_workers
    from echelon.train.data.prepare import prepare as write
    from echelon.train.data.tokenizer import open_tokenizer

    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is removed
    try:
        refuse_what_is_no_token_file(out)
        opened = open_tokenizer(tokenizer)
        fitting = fitting_dtype(opened, dtype.value)
        documents = _documents(inputs, kind, split, column)
        with progress(documents) as done:
            processes = workers or useful_workers(documents.bytes, opened)
            written = write(documents.pieces(), opened, out, dtype=fitting, workers=processes, done=done)
    except DataError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted: {out} was not written", 130)
    speed = written.tokens / (time.monotonic() - begin)
    print(
        f"{written.documents:,} documents, {written.tokens:,} tokens ({fitting}, vocabulary {written.vocabulary:,}) "
        f"in {out}: {speed:,.0f} tokens/s"
    )


@data_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A file of tokens.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of a file without a description.")] = Dtype.uint16,
    tokenizer: Annotated[str, typer.Option(help="To decode with, if it is not the one it was made with.")] = "",
) -> None:
    """Say what a file of tokens holds, and how it begins."""
    from echelon.train.data.token_file import open_tokens
    from echelon.train.data.tokenizer import open_tokenizer

    try:
        tokens, described = open_tokens(file, "uint16" if dtype is Dtype.auto else dtype.value)
        known = described.tokenizer if described else ""
        decoder = open_tokenizer(tokenizer or known) if tokenizer or known else None
    except DataError as error:
        fail(str(error))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(str(file))}[/]: {len(tokens):,} tokens of {tokens.dtype.name}")
    if described:
        console.print(f"{described.documents:,} documents, vocabulary {described.vocabulary:,}, by {escape(known)}")
    else:
        console.print("no description beside it")
    begin = tokens[:_SHOWN].tolist()
    if decoder and begin and max(begin) >= decoder.vocabulary:
        say(f"its tokens are not those of {decoder.name}: {max(begin)} is beyond its {decoder.vocabulary}")
        decoder = None
    print(_printable(decoder.decode(begin)) if decoder else " ".join(map(str, begin)))


@data_app.command()
def pathology(
    folder: Annotated[Path, typer.Argument(help="Where to write: a folder that is new or empty.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Images.")] = 16,
    size: Annotated[int, typer.Option(min=1, help="Pixels a side.")] = 2048,
    kind: Annotated[
        Set, typer.Option(help="`classes`: in folders benign and tumour; `masks`: with the class of each pixel.")
    ] = Set.classes,
    seed: Annotated[int, typer.Option(help="The same one makes the same images.")] = 0,
) -> None:
    """Make images of stained tissue, as large as you like, as tiled TIFF: benign, or with a tumour to be found."""
    from echelon.train.data.bar import bar
    from echelon.train.data.pathology import painted_bytes, write_set

    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is removed
    try:
        with bar("painting", painted_bytes(count, size, kind.value)) as done:
            write_set(folder, count=count, size=size, kind=kind.value, seed=seed, done=done)
    except DataError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted: nothing was written into {folder}", 130)
    speed = count * size**2 / 1e6 / (time.monotonic() - begin)
    print(f"{count:,} images of {size:,} x {size:,} pixels in {folder}: {speed:,.1f} million pixels/s")


def _printable(text: str) -> str:
    """Without what would command the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _documents(inputs: list[str], kind: Kind, split: str, column: str) -> Documents:
    from echelon.train.data.documents import of_dataset, of_files

    if kind is Kind.datasets:
        if len(inputs) > 1:
            raise DataError(f"one dataset at a time, and not {', '.join(inputs)}")
        return of_dataset(inputs[0], split, column)
    passed_over: list[Path] = []
    found = of_files(inputs, passed_over.append)
    if passed_over:
        say(f"passing over {len(passed_over)} files that are empty or no UTF-8 text, such as {passed_over[0]}")
    return found
