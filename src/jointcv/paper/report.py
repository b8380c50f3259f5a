"""One self-contained page with every table and figure and the text of what agrees with the paper."""

import html
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context

from jointcv.paper.cells import escape
from jointcv.paper.drawing import GRID, INK, PAPER, SOFT
from jointcv.paper.figures import figure
from jointcv.paper.findings import AGREES, DIFFERS, NOTED, OPEN, Finding, findings, overview
from jointcv.paper.outcomes import record
from jointcv.paper.reference import TASKS
from jointcv.paper.tables import table

CAPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "elbo": (
            "ELBO on the full data against iterations. At each iteration the step size is the one "
            "that is best there, chosen in retrospect; bands are one standard deviation over seeds."
        ),
        "seconds": (
            "The same against seconds: steps times the time of a compiled step of that estimator run "
            "alone, compilation left out."
        ),
        "step-size": (
            "Final ELBO against step size. A cross marks a step size at which a seed diverged; a "
            "level line is an estimator that brings its own step size."
        ),
        "variance": (
            "Trace of the variance of the location gradient along each estimator's own run at its "
            "best step size. Dashed: V_n, which cv cannot pass, and V_ε, which inc cannot pass, where "
            "joint stood."
        ),
        "variance-scale": (
            "The same for the log scale. The paper's estimators leave it as it is; ours controls it."
        ),
        "memory": (
            "The two memories of the joint estimator: SAGA keeps a location for every datum or "
            "minibatch, SVRG one anchor that a full pass renews every epoch."
        ),
        "optimizers": "SGD against Adam.",
        "nuts": (
            "Error of the posterior mean and variance against NUTS. Dashed: the reference variational "
            "optimum, the best that this family can do."
        ),
        "dropout": "Fine-tuning with multiplicative Gaussian noise on the features of CIFAR-10.",
    }
)
HEADINGS: Mapping[str, str] = MappingProxyType(
    {
        "elbo": "ELBO against iterations",
        "seconds": "ELBO against seconds",
        "step-size": "Step sizes",
        "variance": "Variance of the gradient, and its floors",
        "variance-scale": "Variance of the scale gradient",
        "memory": "SVRG against SAGA",
        "optimizers": "SGD against Adam",
        "nuts": "Against NUTS",
        "dropout": "Dropout",
    }
)
SIGNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {AGREES: ("✓", "agrees"), DIFFERS: ("✗", "differs"), OPEN: ("…", "not run"), NOTED: ("·", "noted")}
)

STYLE = """
:root { --paper: #fdfdfc; --ink: #1b1f24; --soft: #5b6470; --grid: #dfe3e8; --card: #f4f5f6;
  --good: #00734f; --bad: #b3470b; --mark: #fbe3cf; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --soft: #a3abb5;
  --grid: #343a42; --card: #1e2227; --good: #4cc79c; --bad: #f0935a; --mark: #5a3418; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .3rem; }
p { max-width: 46rem; margin: .5rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .8rem 0; font-size: .92rem; }
a { color: inherit; text-underline-offset: 3px; }
.lead, .note, figcaption { color: var(--soft); }
.note { font-size: .86rem; margin: .25rem 0; }
.tally { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; margin: 1rem 0; list-style: none; }
.tally li { background: var(--card); border-radius: .5rem; padding: .5rem .9rem; }
.tally b { font-size: 1.3rem; margin-right: .35rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: 1rem 0 .4rem; }
table { border-collapse: collapse; font-size: .86rem; min-width: 34rem; }
p.title { font-weight: 600; font-size: .95rem; margin: 1.8rem 0 0; }
p.title + .scroll { margin-top: .3rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; white-space: nowrap; }
th { border-bottom: 1.5px solid var(--soft); vertical-align: bottom; font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
th.number { white-space: normal; }
tr.group > td { border-top: 1px solid var(--grid); }
tbody tr:first-child > td { border-top: 0; }
tbody tr:last-child > td { border-bottom: 1.5px solid var(--soft); }
mark { background: var(--mark); color: inherit; padding: .05rem .3rem; border-radius: .25rem; }
sub { line-height: 0; font-size: .72em; }
figure { margin: 1rem 0 2rem; }
figure .scroll svg { display: block; min-width: 40rem; width: 100%; height: auto; }
figcaption { font-size: .9rem; max-width: 46rem; }
ul.findings { list-style: none; padding: 0; margin: .3rem 0 1rem; max-width: 54rem; }
ul.findings li { padding: .28rem 0 .28rem 1.7rem; position: relative; }
ul.findings li > .sign { position: absolute; left: .1rem; font-weight: 700; }
.agrees > .sign, .tally .agrees b { color: var(--good); }
.differs > .sign, .tally .differs b { color: var(--bad); }
.open, .noted > .sign { color: var(--soft); }
.missing { background: var(--card); border-radius: .5rem; padding: .6rem .9rem; color: var(--soft); }
.facts th { border: 0; vertical-align: top; color: var(--soft); font-weight: 500; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.facts tbody tr:last-child > td { border-bottom: 0; }
ul.note { padding-left: 1.2rem; max-width: 46rem; }
details > summary { cursor: pointer; font-weight: 600; margin: .8rem 0 .2rem; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
"""


def report(results: Path) -> str:
    """The page, as HTML that needs nothing from elsewhere.

    Args:
        results: the folder of result files; a missing one is said to be missing.
    """
    said = {task: findings(results, task) for task in TASKS}
    said = {task: found for task, found in said.items() if any(f.verdict != OPEN for f in found)}
    absent = [task.title for name, task in TASKS.items() if name not in said]
    parts = [
        _opening(said, absent),
        _overview(results),
        '<h2 id="agreement">What agrees and what does not</h2>',
        *(_task_findings(task, found) for task, found in said.items()),
        '<h2 id="tables">Tables</h2>',
        *(_table(number, results) for number in (1, 2, 3)),
        _table(5, results),
        _table(7, results),
        _folded("Steps and seconds to the best ELBO of naive and of cv, all estimators", _table(4, results)),
        _folded("Final ELBO by estimator and step size", _table(6, results)),
        '<h2 id="figures">Figures</h2>',
        *(_figure(name, results) for name in CAPTIONS),
        '<h2 id="provenance">Where the numbers come from</h2>',
        _provenance(results),
    ]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>jointcv: the paper, reproduced</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _opening(said: Mapping[str, list[Finding]], absent: list[str]) -> str:
    tally = Counter(finding.verdict for found in said.values() for finding in found)
    items = "".join(
        f'<li class="{verdict}"><b>{tally[verdict]}</b>{word}</li>'
        for verdict, word in ((AGREES, "claims agree"), (DIFFERS, "differ"), (OPEN, "not run"))
    )
    links = {"agreement": "What agrees", "tables": "Tables", "figures": "Figures", "provenance": "Provenance"}
    menu = "".join(f'<a href="#{key}">{text}</a>' for key, text in links.items())
    gone = f'<p class="missing">No results yet for {", ".join(absent)}.</p>' if absent else ""
    return (
        "<h1>The paper, reproduced</h1>"
        '<p class="lead">Wang, Geffner and Domke, “Joint control variate for faster black-box variational '
        "inference”, run again with jointcv. Every number and every sentence below is computed from the "
        "committed result files by <code>jointcv paper report</code>; <code>jointcv paper run</code> wrote "
        "those. The paper’s own numbers stand beside ours.</p>"
        f'<nav>{menu}</nav><ul class="tally">{items}</ul>{gone}'
    )


def _overview(results: Path) -> str:
    return _or_missing(lambda: overview(results).html())


def _table(number: int, results: Path) -> str:
    return _or_missing(lambda: table(number, results).html())


def _figure(name: str, results: Path) -> str:
    heading = f'<h3 id="figure-{name}">{HEADINGS[name]}</h3>'

    def draw() -> str:
        return (
            f'<figure><div class="scroll">{inline_svg(name, results)}</div>'
            f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
        )

    return heading + _or_missing(draw)


def _or_missing(make: Callable[[], str]) -> str:
    """A part of the page, or the sentence that says which results it lacks."""
    try:
        return make()
    except ValueError as error:
        return f'<p class="missing">{escape(str(error))}.</p>'


def inline_svg(name: str, results: Path) -> str:
    """A figure as SVG to stand in the page: its inks follow the page's, and it refers to nothing outside.

    Raises:
        ValueError: its data are missing.
    """
    sheet = figure(name, results)
    sheet.patch.set_visible(False)
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        sheet.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", text)
    text = text.replace("xlink:href", "href").replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    for color, variable in ((INK, "ink"), (SOFT, "soft"), (GRID, "grid"), (PAPER, "paper")):
        text = text.replace(color, f"var(--{variable})")
    label = html.escape(HEADINGS[name], quote=True)
    text = re.sub(r"\n\s*", "\n", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _task_findings(task: str, found: list[Finding]) -> str:
    items = []
    for finding in found:
        sign, word = SIGNS[finding.verdict]
        items.append(
            f'<li class="{finding.verdict}"><span class="sign" aria-hidden="true">{sign}</span>'
            f'<span class="hidden">{word}: </span>{escape(finding.sentence)}</li>'
        )
    return f'<h3 id="{task}">{TASKS[task].title}</h3><ul class="findings">{"".join(items)}</ul>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _provenance(results: Path) -> str:
    records = {name: record(results, f"{name}.json") for name in TASKS}
    notes = [_notes(entries) for entries in records.values() if entries]
    common = [note for note in notes[0] if all(note in other for other in notes)] if len(notes) > 1 else []
    shared = f"<h3>All tasks</h3>{_list(common)}" if common else ""
    return shared + "".join(
        f"<h3>{TASKS[name].title}</h3>{_origin(entries, common, results / f'{name}.json')}"
        for name, entries in records.items()
    )


def _origin(entries: Mapping[str, Any], common: list[str], path: Path) -> str:
    """Commit, device, seeds and so on of one task, and the notes that are its own."""
    if not entries:
        return f'<p class="missing">{path} is missing.</p>'
    lines = "".join(
        f'<tr><th scope="row">{key}</th><td>{escape(value)}</td></tr>'
        for key, value in _facts(entries).items()
        if value
    )
    facts = f'<div class="scroll"><table class="facts"><tbody>{lines}</tbody></table></div>'
    return facts + _list([note for note in _notes(entries) if note not in common])


def _list(notes: list[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="note">{items}</ul>' if items else ""


def _facts(entries: Mapping[str, Any]) -> dict[str, str]:
    return {
        "budget": _plain(entries.get("budget")),
        "commit": _plain(entries.get("commit")),
        "date": _plain(entries.get("date")),
        "device": _plain(entries.get("device")),
        "seeds": _plain(entries.get("seeds")),
        "optimizer": _plain(entries.get("optimizer")),
        "batch": _plain(entries.get("batch")),
        "batch of natural": _plain(entries.get("natural_batch")),
        "precision": _plain(entries.get("dtype")),
        "run time": _run_time(entries.get("seconds")),
        "versions": _plain(entries.get("versions")),
        "configuration": _plain(entries.get("configuration")),
    }


def _run_time(seconds: Any) -> str:
    if isinstance(seconds, Mapping):
        known = {stage: value for stage, value in seconds.items() if isinstance(value, (int, float))}
        stages = ", ".join(f"{stage} {value:,.0f}" for stage, value in known.items())
        return f"{sum(known.values()):,.0f} s ({stages})" if known else ""
    return f"{seconds:,.0f} s" if isinstance(seconds, (int, float)) else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items() if _plain(entry))
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(entry) for entry in value)
    return "" if value is None else str(value)


def _notes(entries: Mapping[str, Any]) -> list[str]:
    notes = entries.get("notes", [])
    return [str(note) for note in ([notes] if isinstance(notes, str) else notes)]
