"""The frame of a page: one file with its style inside, light or dark as its reader's machine is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.train.charts import tag, text

_STYLE = """
:root {
  color-scheme: light dark;
  --back: #fafafa; --card: #fff; --ink: #1c2024; --pale: #687078; --line: #e3e5e8;
  --c0: #2f6bd8; --c1: #e07a2c; --c2: #2a9d6f; --c3: #8b5bd1;
    --c4: #d1495b; --c5: #1597a5; --c6: #b38a12; --c7: #7d858f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #131517; --card: #1b1e21; --ink: #e6e8ea; --pale: #98a0a8; --line: #2e3338;
    --c0: #6ea0ff; --c1: #ffa25c; --c2: #55c99a; --c3: #b48df0;
     --c4: #f07c8b; --c5: #4fc4d1; --c6: #dcb53f; --c7: #9aa2ab;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 28px 20px 60px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { margin: 0; font-size: 26px; }
h2 { margin: 0 0 8px; font-size: 17px; }
p { margin: 6px 0; }
pre { margin: 0; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; }
summary { cursor: pointer; color: var(--pale); }
section, .tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
section { margin-top: 16px; padding: 16px 18px; min-width: 0; overflow-x: auto; }
.lead { margin: 2px 0 20px; color: var(--pale); }
.note, .legend { color: var(--pale); font-size: 13px; }
.legend span { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 3px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin-top: 16px; }
.pair section { margin: 0; }
@media (max-width: 820px) { .pair { grid-template-columns: 1fr; } }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); gap: 12px; }
.tiles div { padding: 10px 14px; }
.tiles b { display: block; font-size: 20px; font-weight: 650; white-space: nowrap; }
.tiles span { color: var(--pale); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--pale); font-weight: 500; }
th.left, td.left { text-align: left; }
tr:last-child td { border: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--pale); font-size: 11.5px; }
.grid { stroke: var(--line); stroke-width: 1; }
.lane { fill: var(--line); opacity: .45; }
.mark line { stroke: var(--pale); stroke-dasharray: 4 4; }
.hover { opacity: 0; }
.hover:hover { opacity: 1; }
.span:hover { filter: brightness(1.25); }
"""


def page(title: str, *inside: str) -> str:
    head = tag("head", '<meta charset="utf-8">', '<meta name="viewport" content="width=device-width">')
    head = head.replace("</head>", tag("title", text(title)) + tag("style", _STYLE) + "</head>")
    return f"<!doctype html>\n{tag('html', head, tag('body', *inside), lang='en')}\n"


def section(title: str, *inside: str) -> str:
    return tag("section", tag("h2", text(title)), *inside)


def pair(*sections: str) -> str:
    """Side by side, where there is room."""
    return tag("div", *sections, class_="pair")


def note(words: str) -> str:
    return tag("p", text(words), class_="note")


def tiles(figures: Mapping[str, str]) -> str:
    made = [tag("div", tag("b", text(figure)), tag("span", text(name))) for name, figure in figures.items()]
    return tag("div", *made, class_="tiles")


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first columns, as many as `left`, hold words."""

    def cells(kind: str, line: Sequence[str]) -> str:
        made = [tag(kind, text(cell), **({"class_": "left"} if at < left else {})) for at, cell in enumerate(line)]
        return tag("tr", *made)

    return tag("table", tag("thead", cells("th", head)), tag("tbody", *(cells("td", line) for line in lines)))
