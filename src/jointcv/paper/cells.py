"""A table as text, Markdown and HTML, and how its numbers are written."""

import html
import math
import re
from dataclasses import dataclass

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """What a cell shows, the number behind it, and whether it is to stand out."""

    text: str
    value: int | float = math.nan
    flagged: bool = False


@dataclass(frozen=True)
class Table:
    """A table to be shown as text, Markdown or HTML.

    Attributes:
        title: what it is.
        columns: heads.
        rows: cells; the first column is a label.
        notes: sentences below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For a terminal, in aligned columns; `*` marks what stands out."""
        lines = [self.columns, *([_marked(cell, "*") for cell in row] for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        left = [self._is_label(column) for column in range(len(self.columns))]

        def show(line) -> str:
            padded = (
                entry.ljust(width) if flush else entry.rjust(width)
                for entry, width, flush in zip(line, widths, left, strict=True)
            )
            return "  ".join(padded).rstrip()

        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        body = [self.title, rule, show(lines[0]), rule, *map(show, lines[1:]), rule]
        return "\n".join([*body, *self.notes]) + "\n"

    def __str__(self) -> str:
        return self.text()

    def markdown(self) -> str:
        """For a README; bold marks what stands out."""
        align = [":--" if self._is_label(column) else "--:" for column in range(len(self.columns))]
        lines = [_markdown_line(self.columns), _markdown_line(align)]
        for row in self.rows:
            lines.append(_markdown_line([f"**{c.text}**" if c.flagged else c.text for c in row]))
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"**{self.title}**", "", *lines, *notes]) + "\n"

    def html(self) -> str:
        """For a page; the class `flag` marks what stands out, `number` what is flush right."""
        kinds = ["" if self._is_label(column) else ' class="number"' for column in range(len(self.columns))]
        head = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>'
            for name, kind in zip(self.columns, kinds, strict=True)
        )
        body = "\n".join(self._html_row(row, kinds) for row in self.rows)
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        return (
            f'<p class="title">{escape(self.title)}</p>'
            f'<div class="scroll"><table aria-label="{html.escape(self.title)}">'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>{notes}"
        )

    def _html_row(self, row: tuple[Cell, ...], kinds: list[str]) -> str:
        cells = []
        for cell, kind in zip(row, kinds, strict=True):
            inner = escape(cell.text)
            cells.append(f"<td{kind}>{f'<mark>{inner}</mark>' if cell.flagged else inner}</td>")
        first = ' class="group"' if row[0].text else ""
        return f"<tr{first}>{''.join(cells)}</tr>"

    def _is_label(self, column: int) -> bool:
        entries = [row[column] for row in self.rows]
        words = not any(math.isfinite(cell.value) for cell in entries)
        return column == 0 or (words and any(cell.text != NOTHING for cell in entries))


def _marked(cell: Cell, mark: str) -> str:
    return f"{mark}{cell.text}" if cell.flagged else cell.text


def _markdown_line(entries) -> str:
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def escape(text: str) -> str:
    """HTML, with V_n, V_eps and V_{n,ε} set as subscripts."""
    safe = html.escape(text, quote=False).replace("V_{n,eps}", "V_{n,ε}").replace("V_eps", "V_ε")
    return re.sub(r"V_(?:\{([^}]*)\}|(\w)\b)", r"V<sub>\1\2</sub>", safe)


def scientific(value: int | float) -> str:
    """4.04e4, as the paper writes it."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def ratio(value: int | float) -> str:
    """0.032, 1.24, 57: three digits at most."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(abs(value)))) if abs(value) < 10 else 0
    return f"{value:,.{min(digits, 6) + (1 if 1 <= abs(value) < 10 else 0)}f}"


def fixed(value: int | float) -> str:
    """An ELBO, with as many decimals as its size asks for."""
    if not math.isfinite(value):
        return NOTHING
    digits = 3 if abs(value) < 1000 else 1 if abs(value) < 1e5 else 0
    return f"{value:,.{digits}f}".replace("-", "−")


def elbo(task: str, value: int | float) -> str:
    """An ELBO; of dropout the training objective, which is its negative."""
    return fixed(-value if task == "dropout" else value)


def duration(seconds: int | float) -> str:
    """Seconds with three digits at most."""
    if not math.isfinite(seconds):
        return NOTHING
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def storage(size: int | float) -> str:
    """Bytes in the unit that suits them."""
    if not math.isfinite(size):
        return NOTHING
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
