"""Draw results.svg from the table in results.md: ``python docs/draw_results.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
TITLE = "Speed of mpiddl relative to alternatives"
WIDTH, ROW, LEFT, RIGHT, TOP = 860, 30, 300, 150, 56


def rows(page: str) -> list[tuple[str, float, str]]:
    """Task, speed relative to the alternative, and the alternative, of each row of the table."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [(task, float(times), other) for task, times, other, *_ in cells[2:]]


def drawing(table: list[tuple[str, float, str]]) -> str:
    """The bars as SVG."""
    longest = max(times for _, times, _ in table)
    unit, height = (WIDTH - LEFT - RIGHT) / longest, TOP + ROW * len(table) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{TITLE}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="28" fill="#333" font-weight="600">{TITLE} (dashed line: equal)</text>',
    ]
    for number, (task, times, other) in enumerate(table):
        y = TOP + ROW * number
        end = LEFT + unit * times
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 15}" text-anchor="end" fill="#333">{escape(task)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{unit * times:.1f}" height="21" rx="3" fill="#3b7dd8"/>',
            f'<text x="{end + 8:.1f}" y="{y + 15}" fill="#333"><tspan font-weight="600">{times:g}</tspan> x {escape(other)}'
            "</text>",
        ]
    equal = f'x1="{LEFT + unit:.1f}" y1="{TOP - 8}" x2="{LEFT + unit:.1f}" y2="{height - 14}"'
    parts += [f'<line {equal} stroke="#c33" stroke-dasharray="4 3"/>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "results.svg").write_text(drawing(rows((HERE / "results.md").read_text())))
