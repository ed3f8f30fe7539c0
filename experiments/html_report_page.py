"""The frame of the HTML report: one file with its style and script inside; nothing is loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from simcore.files import to_json

if TYPE_CHECKING:
    from rich.table import Table

LONG = 80  # rows, above which a table scrolls within its frame
SPEED_BEGINS, SPEED_ENDS = "<!-- sim_speed begins: differs from run to run -->", "<!-- sim_speed ends -->"

# A browser that reads this loads nothing, whatever a label may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--dim:#5c6570;--grid:#e3e6ea;--box:#f5f7f9;--edge:#d3d8de;
--good:#12703f;--bad:#b3261e;--warn:#8a5a00;--s0:#1f6fb4;--s1:#d1600a;--s2:#1a8a5f;--s3:#a24a94;--s4:#8f6c00;--s5:#c23b4b;
--s6:#3797bd;--s7:#6b6b6b;--held:#1f6fb4;--pinned:#a24a94;--cached:#7cb7dd;--free:#e8ecef;--queueing:#d1600a;
--prefill:#1f6fb4;--decode:#7cb7dd;--tool:#c9ced4;--reload:#a24a94}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e6e9ec;--dim:#9aa4ae;--grid:#2b3036;--box:#1d2126;
--edge:#363c43;--good:#62c08d;--bad:#f0857d;--warn:#e0b050;--s0:#5ea9e6;--s1:#f0913f;--s2:#4cc394;--s3:#d488c7;--s4:#d0aa30;
--s5:#ee7784;--s6:#6fc6e6;--s7:#a8a8a8;--held:#5ea9e6;--pinned:#d488c7;--cached:#2c5f86;--free:#262b30;--queueing:#f0913f;
--prefill:#5ea9e6;--decode:#2f6896;--tool:#40474f;--reload:#d488c7}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:20px 24px 60px;background:var(--paper);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:36px 0 8px;border-bottom:1px solid var(--edge);padding-bottom:4px}
h3{font-size:14px;margin:16px 0 4px}p{margin:6px 0}
nav{margin:8px 0 16px}nav a{margin-right:14px;color:var(--s0)}
.verdict{font-size:17px;font-weight:600}.dim,.none{color:var(--dim)}.warn{color:var(--warn);font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}
.card{background:var(--box);border:1px solid var(--edge);border-radius:6px;padding:12px 16px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:8px 20px}
.charts figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:13px}
svg.chart{width:100%;height:auto;display:block}
.scroll{overflow:auto;border:1px solid var(--edge);border-radius:6px}.scroll.log{max-height:520px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
.scroll table{width:100%}
th,td{padding:3px 10px;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}
th{background:var(--box);position:sticky;top:0}td.num,th.num{text-align:right}
td.num{white-space:nowrap}td:first-child{min-width:130px}tr.ends td{border-bottom-color:var(--edge)}
tr.here td{background:var(--box);font-weight:600}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--dim);fill:none}
.tick,.label{font-size:11px;fill:var(--dim)}.label{font-size:12px}.middle{text-anchor:middle}.end{text-anchor:end}
.line{fill:none;stroke-width:1.6;stroke:currentColor}.dot{fill:currentColor}.knee{fill:none;stroke:currentColor;stroke-width:2}
.series.dashed .line{stroke-dasharray:5 3}.off{display:none}.over{fill:transparent}
.s0{color:var(--s0)}.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}
.s4{color:var(--s4)}.s5{color:var(--s5)}.s6{color:var(--s6)}.s7{color:var(--s7)}
.area.held,.key.held{fill:var(--held);background:var(--held)}.area.pinned,.key.pinned{fill:var(--pinned);background:var(--pinned)}
.area.cached,.key.cached{fill:var(--cached);background:var(--cached)}.area.free,.key.free{fill:var(--free);background:var(--free)}
.area.queueing,.key.queueing{fill:var(--queueing);background:var(--queueing)}
.area.prefill,.key.prefill{fill:var(--prefill);background:var(--prefill)}
.area.decode,.key.decode{fill:var(--decode);background:var(--decode)}
.area.tool,.key.tool{fill:var(--tool);background:var(--tool)}
.area.reload,.key.reload{fill:var(--reload);background:var(--reload)}
.legend{margin:6px 0;display:flex;flex-wrap:wrap;gap:4px 14px}
.legend button{border:0;padding:0;background:none;font:inherit;cursor:pointer;display:inline-flex;align-items:center;gap:6px}
.legend button:focus-visible{outline:2px solid var(--s0)}.legend button[aria-pressed=false]{opacity:.4}
.legend button i{background:currentColor}.legend button span{color:var(--ink)}
.legend i,.key{display:inline-block;width:14px;height:10px;border-radius:2px}
.legend .item{display:inline-flex;align-items:center;gap:6px}
.bar{display:inline-block;height:9px;background:var(--s0);margin-right:6px;vertical-align:baseline;border-radius:2px}
input{font:inherit;color:inherit;background:var(--paper);border:1px solid var(--edge);border-radius:4px;padding:4px 8px;
min-width:min(460px,90%)}
details{margin:8px 0}summary{cursor:pointer;font-weight:600}
@media print{nav{display:none}figure,tr{break-inside:avoid}}
"""

# The decision log stands as data and becomes rows when it is asked for: thousands of rows of text would make the page slow.
_SCRIPT = """
"use strict";
(function () {
  document.querySelectorAll(".legend button").forEach(function (button) {
    button.addEventListener("click", function () {
      var on = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!on));
      var section = button.closest("section");
      section.querySelectorAll('[data-series="' + button.dataset.of + '"]').forEach(function (line) {
        line.classList.toggle("off", on);
      });
    });
  });
  var holder = document.getElementById("decision-data");
  if (!holder) return;
  var log = JSON.parse(holder.textContent), most = 500;
  var body = document.getElementById("decision-rows"), said = document.getElementById("decision-said");
  var box = document.getElementById("decision-filter");
  var texts = log.rows.map(function (row) {
    return [log.arms[row[0]], row[1].toFixed(6), log.kinds[row[2]], "replica " + row[3], "request " + row[4],
            log.answers[row[5]]].join(" ").toLowerCase();
  });
  function show() {
    var words = box.value.toLowerCase().split(/\\s+/).filter(Boolean), found = 0, rows = document.createDocumentFragment();
    for (var k = 0; k < log.rows.length; k++) {
      var text = texts[k];
      if (!words.every(function (word) { return text.indexOf(word) >= 0; })) continue;
      if (++found > most) continue;
      var row = log.rows[k], line = document.createElement("tr");
      [log.arms[row[0]], row[1].toFixed(6), log.kinds[row[2]], row[3], row[4], log.answers[row[5]]].forEach(
        function (value, column) {
          var cell = document.createElement("td");
          if (column === 1 || column === 3 || column === 4) cell.className = "num";
          cell.textContent = value;
          line.appendChild(cell);
        });
      rows.appendChild(line);
    }
    body.replaceChildren(rows);
    var more = found > most ? "; the first " + most + " are shown" : "";
    said.textContent = found + " of " + log.rows.length + " rows match" + more;
  }
  box.addEventListener("input", show);
  var asked = /^#filter=(.*)$/.exec(location.hash);
  if (asked) {
    try { box.value = decodeURIComponent(asked[1]); } catch (error) { box.value = asked[1]; }
  }
  show();
  if (asked) document.getElementById("decisions").scrollIntoView();
})();
"""


def page(title: str, under: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """The whole file. `sections`: (id, heading, HTML)."""
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>\n{inner}\n</section>' for name, heading, inner in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n'
        f'<p class="dim">{escape(under)}</p>\n<nav>{links}</nav>\n{body}\n<script>{_SCRIPT}</script>\n</body></html>\n'
    )


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    of = f' class="{style}"' if style else ""
    return "".join(f"<p{of}>{escape(line)}</p>" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), raw: Sequence[int] = (),
          here: int | None = None, ends: Sequence[bool] = (), styles: Sequence[Sequence[str]] = (), body: str = "") -> str:
    """An HTML table. `numbers`: columns set to the right; `raw`: columns that are HTML already; `here`: a row to be seen;
    `ends`: rows after which a group ends; `styles`: CSS classes of each row's cells; `body`: id of a body that the script
    fills, which may be long."""
    def cell(tag: str, k: int, value: str, row: int = -1) -> str:
        style = styles[row][k] if styles and row >= 0 else ""
        of = " ".join(filter(None, ("num" if k in numbers else "", "dim" if value == "N/A" else "", style)))
        attribute = f' class="{of}"' if of else ""
        return f"<{tag}{attribute}>{value if k in raw and row >= 0 else escape(value)}</{tag}>"

    rows = list(rows)
    out = ["<table><thead><tr>", *(cell("th", k, heading) for k, heading in enumerate(headings)),
           f'</tr></thead><tbody id="{body}">' if body else "</tr></thead><tbody>"]
    for j, row in enumerate(rows):
        name = "here" if j == here else "ends" if ends and ends[j] else ""
        out.append(f'<tr class="{name}">' if name else "<tr>")
        out += [cell("td", k, value, j) for k, value in enumerate(row)]
        out.append("</tr>")
    return f'<div class="scroll{" log" if body or len(rows) > LONG else ""}">{"".join([*out, "</tbody></table>"])}</div>'


def terminal_table(shown: Table, *, words: int, markup: bool = False) -> str:
    """A table of the terminal as HTML, so that both say the same. `words`: leading columns that hold no numbers; `markup`:
    green and red cells are kept."""
    from rich.text import Text

    columns = [[str(value) for value in column.cells] for column in shown.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    styles: list[list[str]] = []
    if markup:
        texts = [[Text.from_markup(value) if k >= words else Text(value) for k, value in enumerate(row)] for row in rows]
        named = {"green": "good", "red": "bad", "dim": "dim"}
        styles = [[next((named[str(s.style)] for s in text.spans if str(s.style) in named), "") for text in row]
                  for row in texts]
        rows = [[text.plain for text in row] for row in texts]
    return table([str(column.header) for column in shown.columns], rows, numbers=range(words, len(columns)),
                 ends=[row.end_section for row in shown.rows], styles=styles)


def legend(names: Sequence[str]) -> str:
    """One button a series: it hides and shows the lines of its section."""
    from simcore.experiments.html_report_charts import colour

    return '<div class="legend">' + "".join(
        f'<button type="button" class="{colour(k)}" data-of="{k}" aria-pressed="true"><i></i><span>{escape(name)}</span>'
        "</button>" for k, name in enumerate(names)) + "</div>"


def keys(items: Sequence[tuple[str, str]]) -> str:
    """What the colours of areas mean: (CSS class, words)."""
    return '<div class="legend">' + "".join(
        f'<span class="item"><i class="key {name}"></i>{escape(words)}</span>' for name, words in items) + "</div>"


def figures(charts: Sequence[tuple[str, str]]) -> str:
    """(caption, SVG) side by side."""
    return '<div class="charts">' + "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>" for caption, chart in charts) + "</div>"


def folded(summary: str, inner: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{inner}</details>"


def data(name: str, value: Any) -> str:
    """JSON for the page's script; `<` is written so that no text in it can end the element."""
    text = json.dumps(json.loads(to_json(value)), separators=(",", ":"), sort_keys=True)
    return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>'
