"""`echelon serve` and `echelon generate` as a person runs them: processes, one rank or two, signals, the dead."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from echelon.cli import app
from echelon.comm.records import read as read_records
from echelon.launch.find import find
from echelon.models import hub
from echelon.serve.command import serve
from echelon.serve.load import LoadError
from echelon.serve.options import OptionError, Options, read
from echelon.serve.ranks import open_engine
from echelon.serve.request import BadRequest, SamplingParams
from echelon.train.loop import Trainer
from tests.launch.jobs import run as start_job
from tests.serve.models import small
from tests.train.runs import config

ECHELON = [sys.executable, "-m", "echelon.cli"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TINY = ["--random", "llama-tiny", "--cache-gib", "0.05"]


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ECHELON, *arguments], check=False, env=ENVIRONMENT, capture_output=True, text=True, input=text, timeout=120
    )


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address, once it serves."""
    command = [*ECHELON, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        told = []
        for line in process.stdout:
            told.append(line)
            if found := re.search(r"at (http://\S+)", line):
                yield process, found[1]
                break
        else:
            pytest.fail("".join(told))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def ask(address: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


HELLO = {"model": "llama-tiny", "prompt": "hello", "max_tokens": 8, "seed": 1, "ignore_eos": True}


def test_two_ranks_serve_and_end_when_they_are_told() -> None:
    with server(*TINY, "-n", "2") as (process, address):
        answer = ask(address, **HELLO)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 8)
    printed = run("generate", *TINY, "hello", "--max-tokens", "8", "--seed", "1", "--temperature", "1")
    assert printed.stdout == "hello" + answer["choices"][0]["text"] + "\n"


def test_a_rank_that_dies_ends_the_service() -> None:
    with server(*TINY, "-n", "2") as (process, address):
        ask(address, **HELLO)
        [second] = [each for each in ranks_of(process.pid) if environment(each).get("PMI_RANK") == "1"]
        os.kill(second, signal.SIGKILL)
        code = process.wait(60)
        assert process.stdout is not None
        assert "rank 1: died" in process.stdout.read()
        assert code == signal.SIGKILL


def test_ctrl_c_ends_an_answer_of_two_ranks_without_a_fuss() -> None:
    command = [*ECHELON, "generate", *TINY, "hello", "-n", "2", "--max-tokens", "2000", "--temperature", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10).startswith("hello"), "the answer has begun"
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert process.returncode == 130
    assert told == "echelon: asked the job to stop; a second signal ends it at once\n"


def test_what_cannot_be_served_by_several_ranks_is_said_once(tmp_path: Path) -> None:
    refused = run("serve", str(tmp_path), "-n", "2")
    assert refused.returncode == 2
    loading, why = refused.stderr.splitlines()
    assert loading == f"echelon: loading {tmp_path}; requests wait until it is ready"
    assert why.startswith(f"echelon: {tmp_path} is no folder with a model's")


def ranks_of(process: int) -> list[int]:
    """The processes of a job that run a rank."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"echelon.serve.rank" in path.read_bytes() and is_below(int(path.parent.name), process):
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [each for each in found if "PMI_RANK" in environment(each)]


def is_below(process: int, ancestor: int) -> bool:
    while process > 1:
        if process == ancestor:
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def environment(process: int) -> dict[str, str]:
    pairs = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_generate_from_a_folder_by_any_number_of_ranks(tmp_path: Path) -> None:
    hub.save(small(), tmp_path)
    greedy = ["--temperature", "0", "--max-tokens", "12", "--cache-gib", "0.02"]
    alone = run("generate", str(tmp_path), "-", *greedy, text="what")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout.startswith("what")
    split = run("generate", str(tmp_path), "what", "-n", "2", *greedy, "--record", str(tmp_path / "record"))
    assert (split.returncode, split.stdout) == (0, alone.stdout)
    sums = [
        each.payload // (48 * 4)  # tokens of a step: fp32, and the model is 48 wide
        for each in read_records(tmp_path / "record")[0]
        if (each.dimension, each.operation) == ("tp", "all_reduce") and each.dtype == "float32"
    ]
    a_step = 2 * 2 + 1  # all-reduces, of two layers and the embedding
    assert sums == [4] * a_step + [1] * (11 * a_step), "the prompt, and then a token at a time"


def train(folder: Path) -> None:
    Trainer(config(), folder).run()


def test_a_run_is_served_as_its_newest_checkpoint(ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "run"
    ranks(2, train, run)
    prompt, greedy = [1, 2, 3], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for _ in range(2):  # written as a folder, and found there again
        engine = open_engine(Options(source=str(run), cache_gib=0.001))
        assert engine is not None
        with closing(engine):
            [answer] = engine.generate([prompt], greedy)
            assert engine.name == "run-step-6"
            with pytest.raises(BadRequest, match="numbers from 0 to 63"):  # its text is bytes, and its vocabulary less
                engine.open("hello", greedy)
    model: Any = hub.load(run / "serving" / "step-6").eval()
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(answer.choices[0].tokens) == tokens[3:]
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(LoadError, match="has no checkpoint yet"):
        open_engine(Options(source=str(run)))


@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_other_launchers_ranks_are_ours(launcher: str, request: pytest.FixtureRequest) -> None:
    """No second launcher: `mpiexec -n 2 echelon generate …`, and srun."""
    ours = ["generate", *TINY, "hello", "--max-tokens", "8", "--seed", "1"]
    if launcher == "srun":
        environment, start = request.getfixturevalue("slurm"), ["srun", "--mpi=pmi2", "-n", 2]
    else:
        environment, start = {}, [find().mpiexec, "-n", 2]
    job = start_job(*start, *ECHELON, *ours, timeout=120, **ENVIRONMENT | environment)
    assert (job.returncode, job.stdout) == (0, run(*ours).stdout), job.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["serve"], "name what shall be served"),
        (["serve", "nowhere"], "nowhere is not there: name a Hugging Face folder"),
        (["serve", "--random", "lama-tiny"], "did you mean 'llama-tiny'?"),
        (["serve", "--random", "llama-tiny", "--quantize", "int4"], "quantize 'int4' is none of none, int8"),
        (["serve", "--random", "llama-tiny", "--precision", "fp8"], "precision 'fp8' is none of auto, fp32"),
        (["serve", "--random", "llama-tiny", "--device", "cpufoo"], "device 'cpufoo' is none of auto, cpu, cuda and"),
        (["serve", "--random", "llama-tiny", "--slo", "fast"], "'fast' is not a promise"),
        (["serve", "--random", "llama-tiny", "--page-size", "10"], "page_size=10 does not divide 128"),
        (["serve", "--random", "llama-tiny", "--host", "1.2.3.4"], "cannot listen on 1.2.3.4"),
        (["serve", "--random", "llama-tiny", "-n", "2", "--tp", "4"], "-n 2 with tp=4: all ranks share one model"),
        (["serve", "--random", "llama-tiny", "--cache-gib", "0.0001"], "give it more memory"),
        (["generate", "--random", "llama-tiny", ""], "the prompt is empty"),
        (["generate", "--random", "llama-tiny", "x", "--top-p", "2"], "top_p is 2: it must be above 0 to 1"),
        (["generate", "--random", "llama-tiny", "folder", "x"], "only a prompt is named"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported all that takes so long."""
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert why in " ".join((refused.output + capfd.readouterr().err).split())


def test_options_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('source = "model"\ntp = 2\ncache_gib = 1\nslo = "tbt=25ms"\n')
    assert read(file) == {"source": str(tmp_path / "model"), "tp": 2, "cache_gib": 1.0, "slo": "tbt=25ms"}
    for text, why in (
        ("prot = 1", "no option is named 'prot' (did you mean 'port'?)"),
        ('tp = "2"', "tp = '2' must be a whole number"),
        ("tp = ", "is no TOML"),
    ):
        file.write_text(text)
        with pytest.raises(OptionError, match=re.escape(why)):
            read(file)
    options = Options(random="gpt2", slo="tbt=1s", cache_gib=0.5)
    assert Options.from_text(options.to_text()) == options


def test_flags_have_the_options_own_defaults() -> None:
    """They are written out in command.py, which must not wait for torch."""
    flags = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    shared = {field.name: field.default for field in dataclasses.fields(Options) if field.name != "tp"}
    assert {name: flags[name] for name in shared} == shared


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('random = "llama-tiny"\nprecision = "nonsense"\ncache_gib = 0.05\n')
    with server(str(tmp_path / "serve.toml"), "--precision", "bf16") as (process, address):
        assert ask(address, **HELLO)["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
