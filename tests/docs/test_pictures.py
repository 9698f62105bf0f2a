"""The committed pictures are what the kept results draw: bars are measured in the files, by their shapes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import pictures

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "step": (pictures.step_bars, pictures.step_lines),
    "memory": (pictures.memory_bars, pictures.memory_lines),
}


def expected(name: str) -> dict[str, float]:
    bars, lines = DATA[name][0](), DATA[name][1]()
    return {bar.ident: bar.value / lines[bar.panel] for bar in bars}


@pytest.mark.parametrize("page", pictures.PAGES, ids=lambda page: page.suffix or "wide")
@pytest.mark.parametrize("look", pictures.LOOKS)
@pytest.mark.parametrize("name", DATA)
def test_the_committed_picture_is_what_the_results_draw(name: str, look: str, page: pictures.Page) -> None:
    found = pictures.measured(ROOT / f"docs/images/{name}{page.suffix}-{look}.svg")
    assert found == pytest.approx(expected(name), rel=1e-4), "run `make pictures` and commit the pictures"


def test_a_bar_of_another_height_is_seen(tmp_path: Path) -> None:
    """One bar of a committed picture, a tenth lower."""
    text = (ROOT / "docs/images/step-light.svg").read_text()
    ident, points = next(iter(pictures.shapes(text, "bar:")))
    top, ground = min(points), max(points)
    start = text.index(f'<g id="{ident}"')
    shape = text[start : start + 300]
    changed = tmp_path / "step.svg"
    changed.write_text(text.replace(shape, shape.replace(f" {top:g}", f" {top + (ground - top) / 10:.4f}")))
    found = pictures.measured(changed)
    assert found[ident] == pytest.approx(0.9 * expected("step")[ident], rel=1e-3)


def test_the_title_says_what_the_bars_say() -> None:
    value = {(bar.panel, bar.group, bar.side): bar.value for bar in pictures.step_bars()}
    slowest = min(value[d, s, "upstream"] / value[d, s, "ours"] for d in ("fp32", "bf16") for s in pictures.STAGES)
    assert f"{slowest:.2f}–" in pictures.step_title()
    assert slowest > 1, "the title says faster"


@pytest.mark.parametrize("name", DATA)
def test_text_is_readable_on_a_phone(name: str) -> None:
    """9 CSS pixels and more where the picture is 358 wide, and nothing runs out of the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.text import Text

    page = pictures.PAGES[1]
    figure = pictures.draw(name, "light", page)
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert len(texts) > 20
    assert min(text.get_fontsize() for text in texts) * 358 / (page.inches[0] * 72) >= 9
    figure.canvas.draw()
    edge = figure.bbox
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= edge.x0 and box.x1 <= edge.x1 and box.y0 >= edge.y0 and box.y1 <= edge.y1, text.get_text()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_phones_get_the_picture_for_phones(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = [found.partition("#")[0] for found in re.findall(r'(?:srcset|src)="([^"]+)"', text)]
    drawn = {f"{name}{size.suffix}-{look}.svg" for name in DATA for look in pictures.LOOKS for size in pictures.PAGES}
    assert {Path(path).name for path in shown} == drawn
    assert all(((ROOT / page).parent / path).exists() for path in shown)
    assert text.count("(max-width: 600px)") == 2 * len(DATA)
