"""Hugging Face's library `datasets`: a name on the hub, or a local folder or file that it reads."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from echelon.train.data.errors import DataError

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}


def open_dataset(path: str, split: str, column: str) -> Any:
    """The split of a dataset, which has a column of texts."""
    try:
        datasets: Any = import_module("datasets")
    except ModuleNotFoundError:
        raise DataError("to read Hugging Face's datasets: pip install datasets") from None
    try:
        dataset = _load(datasets, path, split)
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds
        raise DataError(f"datasets cannot load {path!r} (split {split!r}): {error}") from None
    if column not in dataset.column_names:
        raise DataError(f"{path} has no column {column!r}: it has {', '.join(dataset.column_names)}")
    if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
        raise DataError(f"the column {column!r} of {path} holds no text: {dataset.features[column]}")
    return dataset


def _load(datasets: Any, path: str, split: str) -> Any:
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix not in _FORMATS:
            raise DataError(f"{local} is none of {', '.join(_FORMATS)}")
        return datasets.load_dataset(_FORMATS[local.suffix], data_files={split: str(local)}, split=split)
    if (local / "dataset_dict.json").is_file():  # as `save_to_disk` writes it
        return datasets.load_from_disk(str(local))[split]
    if (local / "state.json").is_file():
        return datasets.load_from_disk(str(local))
    return datasets.load_dataset(str(local) if local.is_dir() else path, split=split)
