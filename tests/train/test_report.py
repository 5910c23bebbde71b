"""report.html: whole pages of whole runs, and pages that say what is missing of others."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from echelon.train import rows
from echelon.train.charts import Series, line_chart, thin, ticks
from echelon.train.report import write_report
from tests.train.run_folders import make, start_row, step_row, whole_run

VOID = ("meta", "br", "hr")


class Page(HTMLParser):
    """Elements by the section that they are in; fails where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[tuple[str, dict[str, str]]]] = {}
        self.words: dict[str, str] = {}
        self.here = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.sections.setdefault(self.here, []).append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, words):
        if self.open and self.open[-1] == "h2":
            self.here = words
        self.words[self.here] = self.words.get(self.here, "") + words + "\n"

    def count(self, section: str, tag: str, **attributes: str) -> int:
        found = [given for name, given in self.sections[section] if name == tag]
        return sum(all(given.get(key) == value for key, value in attributes.items()) for given in found)

    def curves(self, section: str) -> list[int]:
        """The number of points of each."""
        return [len(given["points"].split()) for name, given in self.sections[section] if name == "polyline"]


def report_of(folder) -> Page:
    return Page(write_report(folder).read_text())


def test_a_whole_run(tmp_path):
    page = report_of(make(tmp_path / "first <run>", whole_run(), memory=True, record=True))
    assert "first <run>" in page.words[""]
    for figure in ("124M", "1:41", "3.0000", "2.0000", "1.06k", "25.0%"):
        assert figure in page.words[""]
    assert page.curves("Loss") == [10, 2]
    for section in ("Throughput", "Communication that was not overlapped", "Learning rate", "Norm of the gradients"):
        assert page.curves(section) == [10]
        assert page.words[section].count("step 10: ") == 1
    assert "resumed on 2 ranks" in page.words["Loss"]
    assert "<grid>" in page.words["Layout"]
    assert 'name = "gpt2"' in page.words["Config"]


def test_memory_by_kind(tmp_path):
    page = report_of(make(tmp_path / "run", whole_run(), memory=True))
    section = "Memory of a rank, by kind"
    assert page.count(section, "rect") == 4 * 4  # predicted and measured of rank 0 and of the largest, but no host
    assert "rank 0, measured, gradients: 400 B" in page.words[section]
    assert "rank 0, predicted, gradients: 200 B" in page.words[section]
    assert "+100.0%" in page.words[section]


def test_what_a_process_on_a_cpu_has_beside_is_not_drawn(tmp_path):
    page = report_of(make(tmp_path / "run", [start_row(device="CPU, threads: 1"), step_row(10)], memory=True))
    assert page.count("Memory of a rank, by kind", "rect") == 4 * 3


def test_communication(tmp_path):
    page = report_of(make(tmp_path / "run", whole_run(), record=True))
    section = "Communication, by dimension"
    assert page.count(section, "rect") == 2
    assert "tp, all_reduce: 24.6 KB" in page.words[section]  # six of 4096 bytes, a rank
    assert page.count(section, "tr") == 1 + 2


def test_the_timeline_is_of_the_step_of_median_length(tmp_path):
    page = report_of(make(tmp_path / "run", whole_run(), record=True))
    section = "Timeline of one step"
    assert page.words[section].lstrip().startswith("Timeline of one step\n12 ms")
    assert page.count(section, "rect", **{"class": "lane"}) == 4  # two ranks, tp and dp
    assert page.count(section, "g", **{"class": "span"}) == 2 * 3
    assert page.words[section].count("all_reduce (tp), 4.1 KB float32: 1 ms, blocked 500 µs") == 4
    assert page.count(section, "rect", opacity="1") == page.count(section, "rect", opacity="0.4") == 6


def test_a_page_needs_nothing_else(tmp_path):
    text = write_report(make(tmp_path / "run", whole_run(), memory=True, record=True)).read_text()
    assert not re.search(r"<script|<link|<img|src=|url\(|https?:|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert sorted(file.name for file in (tmp_path / "run").iterdir() if file.suffix == ".new") == []


@pytest.mark.parametrize(
    "told",
    [
        [],
        [start_row()],
        [start_row(), step_row(1)],
        [step_row(1)],
        [start_row(), step_row(1, loss=None, norm=None)],
        [start_row(), step_row(1, loss=None), step_row(2)],
        [{"kind": "start", "step": 0}],
        [start_row(), {"kind": "skip", "step": 3, "norm": None}, {"kind": "eval", "step": 3, "loss": 2.0}],
    ],
)
def test_a_run_of_which_little_is_known(tmp_path, told):
    page = report_of(make(tmp_path / "run", told))
    assert "There is none: it needs the record of a step." in page.words["Timeline of one step"]
    assert "No steps were recorded" in page.words["Communication, by dimension"]
    assert "memory.json is missing" in page.words["Memory of a rank"]
    assert "None was saved." in page.words["Checkpoints"]
    with_loss = [row for row in told if row["kind"] in ("step", "eval") and row.get("loss") is not None]
    assert ("No step has been logged with a loss." in page.words["Loss"]) == (not with_loss)
    assert sum(page.curves("Loss")) == len(with_loss)


def test_a_killed_job(tmp_path):
    folder = make(tmp_path / "run", [start_row(), step_row(10)], record=True)
    with (folder / rows.FILE).open("a") as file:
        file.write('{"kind": "st')
    (folder / "memory.json").write_text('{"rank')
    numbers = folder / "record" / "rank-1.rows"
    numbers.write_bytes(numbers.read_bytes()[:-5])
    page = report_of(folder)
    assert page.curves("Loss") == [1]
    assert page.count("Timeline of one step", "g", **{"class": "span"}) > 0


def test_a_record_that_cannot_be_read(tmp_path):
    folder = make(tmp_path / "run", whole_run(), record=True)
    (folder / "record" / "rank-0.json").write_text("{")
    assert "cannot be read" in report_of(folder).words["Communication, by dimension"]


def test_energy(tmp_path):
    told = [start_row(energy=["GPU (NVML)"]), *(step_row(step, joules=50.0, tokens_joule=4.0) for step in (10, 20))]
    page = report_of(make(tmp_path / "run", told))
    assert "100J\nenergy" in page.words[""]
    assert "4\ntokens a joule" in page.words[""]
    assert "GPU (NVML)" in page.words[""]


def test_ticks_are_round_and_inside():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3, 5) == [3]
    assert all(0.13 <= tick <= 0.87 for tick in ticks(0.13, 0.87, 6))


def test_a_long_curve_is_thinned_but_keeps_its_ends():
    points = [(float(x), 1.0) for x in range(100_001)]
    kept = thin(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert len(kept) <= 601
    assert Counter(re.findall("<(circle|polyline)", line_chart([Series("loss", points, 0)])))["circle"] == len(kept)
