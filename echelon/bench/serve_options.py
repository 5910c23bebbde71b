"""What `echelon bench serve` was asked for, checked before anything is sent. Names and defaults are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon.bench.serve_load import RandomLoad
from echelon.bench.serve_result import METRICS, OBJECTIVES
from echelon.bench.serve_target import ENDPOINTS

DATASETS = ("random", "custom")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One request for a measurement. `sampling` has only what was given: the rest is the server's to choose."""

    base_url: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str = ""
    backend: str = "openai"
    model: str = ""
    in_process: str = ""  # a folder with a model: its engine is asked, and no server
    weights: str = ""  # the same, a preset's name: its weights are random
    precision: str = "auto"  # of such a model
    device: str = "auto"
    tokenizer: str = ""
    api_key: str = ""
    dataset_name: str = "random"
    dataset_path: str = ""
    custom_output_len: int = 256
    random: RandomLoad = field(default_factory=RandomLoad)
    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    num_warmups: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    percentile_metrics: tuple[str, ...] = tuple(METRICS)
    percentiles: tuple[float, ...] = (99.0,)
    goodput: dict[str, float] = field(default_factory=dict)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str = ""
    result_filename: str = ""
    json: str = ""
    quiet: bool = False  # no progress bar

    @property
    def url(self) -> str:
        """Where the server is. With or without the /v1 that OpenAI's clients have in it."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def label(self) -> str:
        """Who is asked, in a word."""
        return "in-process" if self.in_process or self.weights else self.backend

    def check(self) -> None:
        """Raise a `ValueError` that tells the user what is wrong, if anything is."""
        for name, value, among in (
            ("--backend", self.backend, tuple(ENDPOINTS)),
            ("--dataset-name", self.dataset_name, DATASETS),
            *(("--percentile-metrics", metric, tuple(METRICS)) for metric in self.percentile_metrics),
        ):
            if value not in among:
                raise ValueError(f"{name} {value}: it is one of {', '.join(among)}")
        for name, number, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-concurrency", 1 if self.max_concurrency is None else self.max_concurrency, 1),
            ("--num-warmups", self.num_warmups, 0),
            ("--custom-output-len", self.custom_output_len, 1),
            ("--random-input-len", self.random.input_tokens, 1),
            ("--random-output-len", self.random.output_tokens, 1),
            ("--random-prefix-len", self.random.prefix_tokens, 0),
        ):
            if number < least:
                raise ValueError(f"{name} {number}: it is {least} or more")
        if not 0 <= self.random.spread < 1:
            raise ValueError(f"--random-range-ratio {self.random.spread:g}: it is from 0 to less than 1")
        if not self.request_rate > 0:
            raise ValueError(f"--request-rate {self.request_rate:g}: it is above 0; inf sends all at once")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"--burstiness {self.burstiness:g}: it is above 0; 1 is a Poisson process")
        if bool(self.in_process) + bool(self.weights) + bool(self.base_url) > 1:
            raise ValueError("--base-url, --in-process and --random each say who is asked: give one of them")
        if (self.dataset_name == "custom") != bool(self.dataset_path):
            raise ValueError("--dataset-name custom and --dataset-path FILE belong together: give both or neither")
        if (self.result_dir or self.result_filename or self.save_detailed) and not (self.save_result or self.json):
            raise ValueError("--save-detailed, --result-dir and --result-filename need --save-result")

    def about(self, model: str) -> dict[str, Any]:
        """What the file tells of the run, beside the figures: vLLM's fields, and all options."""
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        rate = "inf" if math.isinf(self.request_rate) else self.request_rate
        return {
            "date": now,
            "backend": self.label,
            "model_id": model,
            "tokenizer_id": self.tokenizer or None,
            "num_prompts": self.num_prompts,
            "request_rate": rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            "options": asdict(self) | {"api_key": "", "request_rate": rate},
        }

    def files(self, about: dict[str, Any]) -> list[Path]:
        """Where the result goes: the file of `--json`, and that of `--save-result`, which has vLLM's name."""
        files = [Path(self.json)] if self.json else []
        if self.save_result:
            most = "" if self.max_concurrency is None else f"-concurrency{self.max_concurrency}"
            model = str(about["model_id"]).rstrip("/").rpartition("/")[2]
            usual = f"{self.label}-{self.request_rate}qps{most}-{model}-{about['date']}.json"
            files.append(Path(self.result_dir) / (self.result_filename or usual))
        return files


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:5000` is the most milliseconds that a good request takes."""
    bounds = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in OBJECTIVES:
            raise ValueError(f"--goodput {text}: write NAME:MILLISECONDS, with one of {', '.join(OBJECTIVES)}")
        bounds[name] = _number(f"--goodput {text}", value)
    return bounds


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,99`"""
    percentiles = tuple(_number(f"--metric-percentiles {text}", part) for part in text.split(","))
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError(f"--metric-percentiles {text}: they are from 0 to 100")
    return percentiles


def _number(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: {text!r} is no number from 0 up")
    return value
