"""The doctor's report as one HTML page: verdict, what to do, every group; nothing from outside.

Made from the document vcli.doctor/1, whose secrets are out already; every text is escaped here.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, Final

from vcli.diagnostics.registry import GROUPS

_WORDS: Final = {
    "pass": "passed", "warn": "warning", "fail": "failed", "skip": "not applicable",
    "unknown": "unknown",
}  # fmt: skip
_MARKS: Final = {"pass": "✓", "warn": "!", "fail": "✗", "skip": "·", "unknown": "?"}
_SEVERITY: Final = ("fail", "warn", "unknown", "pass", "skip")
_PROBLEMS: Final = ("fail", "warn", "unknown")

_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#16181d;--dim:#5b6270;--line:#d9dde4;--box:#f5f6f8;
--pass:#1a7f37;--warn:#9a6700;--fail:#cf222e;--unknown:#8250df;--skip:#6e7781}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--fg:#e6e8ec;--dim:#9aa3b2;--line:#333842;
--box:#1d2026;--pass:#3fb950;--warn:#d29922;--fail:#ff7b72;--unknown:#bc8cff;--skip:#8b949e}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:70rem;padding:1.5rem 1rem 4rem;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.dim{color:var(--dim)}.pass{color:var(--pass)}.warn{color:var(--warn)}.fail{color:var(--fail)}
.unknown{color:var(--unknown)}.skip{color:var(--skip)}
.verdict{border-left:.4rem solid currentColor;padding-left:1rem}
.verdict .dim{color:var(--dim)}
.item{border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem;margin:.5rem 0}
.item p{margin:.2rem 0;overflow-wrap:anywhere}
.fix{display:flex;gap:.5rem;align-items:flex-start;margin-top:.4rem}
code,pre{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",Consolas,monospace}
.fix code{flex:1;background:var(--box);padding:.35rem .6rem;border-radius:.3rem;user-select:all;
white-space:pre-wrap;overflow-wrap:anywhere}
button{font:inherit;font-size:13px;padding:.2rem .6rem;border:1px solid var(--line);
border-radius:.3rem;background:var(--bg);color:var(--fg);cursor:pointer}
details{border-bottom:1px solid var(--line);padding:.4rem 0}
summary{cursor:pointer;font-weight:600}summary .dim{font-weight:400}
table{border-collapse:collapse;width:100%;margin:.4rem 0}
td{padding:.25rem .5rem .25rem 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{width:1.2rem}td:nth-child(2){white-space:nowrap;font-weight:600}
td:nth-child(3){width:30%}
pre{background:var(--box);padding:.8rem;overflow:auto;border-radius:.3rem}
@media print{button{display:none}}
"""
_SCRIPT: Final = """
document.addEventListener('click',function(event){
  var button=event.target.closest('button');if(!button)return;
  var code=button.parentNode.querySelector('code');
  var range=document.createRange();range.selectNodeContents(code);
  var chosen=getSelection();chosen.removeAllRanges();chosen.addRange(range);
  var done=function(){button.textContent='copied'};
  if(navigator.clipboard){navigator.clipboard.writeText(code.textContent).then(done,function(){
    if(document.execCommand('copy'))done()})}
  else if(document.execCommand('copy'))done();
});
"""


def report_page(document: Mapping[str, Any], *, headline: str, closing: str, made_at: str) -> str:
    """The page; `headline` and `closing` are those of the text view."""
    checks: Sequence[Mapping[str, Any]] = document["checks"]
    problems = [item for word in _PROBLEMS for item in checks if item["status"] == word]
    worst = next((w for w in _SEVERITY if any(item["status"] == w for item in checks)), "pass")
    host = document["host"]
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>vcli doctor: {escape(str(host.get('hostname', '')))}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f'<header class="verdict {worst}"><h1>{_verdict(document, worst)}</h1>',
            f'<div class="dim">{escape(closing)}</div>',
            f'<div class="dim">{escape(str(host.get("hostname", "")))} · {escape(headline)} · '
            f"{escape(made_at)}</div></header>",
            *_problem_section(problems),
            *_change_section(document.get("changes")),
            "<h2>All checks</h2>",
            *(_group(name, list(items)) for name, items in groupby(checks, lambda i: i["group"])),
            "<h2>What was seen</h2>",
            _values("This machine", host),
            _values("The plan", document["plan"]),
            f"<script>{_SCRIPT}</script></body></html>",
            "",
        )
    )


def _verdict(document: Mapping[str, Any], worst: str) -> str:
    summary = document["summary"]
    if summary["interrupted"]:
        return "Interrupted: this is what is known so far"
    if summary["launch_refused"]:
        return "A launch would be refused"
    return {
        "fail": "Something does not work",
        "warn": "It works, and there is something to know",
        "unknown": "Nothing is wrong as far as it could be measured",
    }.get(worst, "This machine is fit")


def _problem_section(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    if not problems:
        return []
    return ["<h2>What to do, in the order of repair</h2>", *map(_problem, problems)]


def _problem(item: Mapping[str, Any]) -> str:
    status = str(item["status"])
    lines = [
        f'<div class="item"><p><b class="{status}">{_MARKS[status]} {escape(item["id"])}</b> '
        f"{escape(item['title'])}: {escape(item['measured'])}</p>"
    ]
    if item["why"]:
        text = f"expected {item['expected']}; {item['why']}"
        lines.append(f'<p class="dim">{escape(text)}</p>')
    if item["remedy"]:
        lines.append(_fix(item["remedy"]))
    return "".join((*lines, "</div>"))


def _fix(remedy: str) -> str:
    return (
        f'<div class="fix"><code>{escape(remedy)}</code><button type="button">copy</button></div>'
    )


def _change_section(changes: Sequence[Mapping[str, str]] | None) -> list[str]:
    if not changes:
        return []
    rows = "".join(
        f"<tr><td></td><td>{escape(change['subject'])}</td><td>{escape(change['before'])}</td>"
        f"<td>{escape(change['now'])}</td></tr>"
        for change in changes
    )
    return ["<h2>Differs from the baseline</h2>", f"<table>{rows}</table>"]


def _group(name: str, items: Sequence[Mapping[str, Any]]) -> str:
    worst = next(word for word in _SEVERITY if any(item["status"] == word for item in items))
    counts = ", ".join(
        f"{count} {_WORDS[word]}{'s' * (word == 'warn' and count > 1)}"
        for word in _SEVERITY
        if (count := sum(item["status"] == word for item in items))
    )
    rows = "".join(
        f'<tr><td class="{item["status"]}" title="{_WORDS[item["status"]]}">'
        f"{_MARKS[item['status']]}</td><td>{escape(item['id'])}</td>"
        f"<td>{escape(item['title'])}</td><td>{escape(item['measured'])}</td></tr>"
        for item in items
    )
    is_open = " open" if worst in _PROBLEMS else ""
    return (
        f'<details{is_open}><summary><span class="{worst}">{_MARKS[worst]}</span> '
        f'{escape(GROUPS.get(name, name))} <span class="dim">{escape(counts)}</span></summary>'
        f"<table>{rows}</table></details>"
    )


def _values(title: str, value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
