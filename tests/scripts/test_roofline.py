"""scripts/roofline: points where they belong, text and picture that can be read."""

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SVG = "{http://www.w3.org/2000/svg}"


def row(
    group: str, name: str, us: float, nbytes: float, flops: float, tokens: int = 1, context: int = 0
) -> dict[str, Any]:
    return {
        "group": group, "name": name, "shape": "", "tokens": tokens, "context": context, "nbytes": nbytes,
        "flops": flops, "in_memory": nbytes > 1e6, "us": us, "peer_us": None,
    }  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    """A card of 4,000 GB/s and 800 TFLOP/s; all of the decode step lies at nearly one intensity."""
    rows = [
        row("operation", "gate_up", 25.0, 92e6, 357e6),  # 92 %
        row("operation", "down", 16.0, 46e6, 178e6),
        row("operation", "qkv", 14.0, 38e6, 147e6),
        row("operation", "in_proj", 16.0, 44e6, 168e6),
        row("operation", "out", 7.0, 16e6, 63e6),
        row("operation", "o", 7.1, 16e6, 63e6),
        row("operation", "norm + lm_head", 350.0, 1271e6, 2543e6),
        row("operation", "attention", 8.0, 4e6, 25e6, 1, 1024),
        row("operation", "attention", 150.0, 537e6, 3221e6, 1, 131072),
        row("operation", "gated delta net", 4.0, 6e6, 5e6),
        row("operation", "embedding", 3.0, 5120, 0),
        row("product", "gate_up", 24.0, 92e6, 357e6),
        row("small", "swiglu", 3.0, 1e5, 0),
        row("prefill", "gate_up", 1100.0, 92e6, 730e9, 2048),  # 83 %
        row("prefill", "gate_up", 4300.0, 92e6, 2920e9, 8192),
        row("prefill", "gate_up", 200.0, 92e6, 71e9, 200),
        row("prefill", "attention", 2500.0, 34e6, 824e9, 8192, 8192),
        row("prefill", "attention", 300.0, 134e6, 160e9, 200, 32768),
        row("step", "decode", 3900.0, 14.2e9, 50e9, 1, 1024),
        row("step", "prefill", 700_000.0, 57e9, 400e12, 8192, 8192),
    ]
    about = {"model": "qwen3.5-27b", "device": "a <fast> card", "date": "2026-11-30"}
    return {**about, "ceilings": {"read": 4e12, "sheet": 4.8e12, "dense": 8e14}, "rows": rows}


@pytest.fixture
def roofline(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("roofline")


def test_shares_are_of_the_roof_at_that_intensity(roofline: ModuleType, document: dict[str, Any]) -> None:
    roof, points = roofline.points_of(document)
    assert roof.ridge == pytest.approx(200)
    share = {(point.group, point.name): point.share for point in points}
    assert share["operation", "gate_up"] == pytest.approx(92e6 / 25e-6 / 4e12)
    assert share["prefill", "gate_up, 2,048 tokens"] == pytest.approx(730e9 / 1100e-6 / 8e14)
    assert share["step", "whole step: decode at 1,024"] == pytest.approx(14.2e9 / 3900e-6 / 4e12)
    names = {name for _, name in share}
    assert {"attention at 131,072", "attention, 200 tokens at 32,768", "attention, 8,192 tokens"} <= names
    assert not names & {"embedding", "swiglu", "gate_up, 200 tokens", "gate_up, 8,192 tokens"}


def test_text(roofline: ModuleType, document: dict[str, Any]) -> None:
    lines = roofline.text_of(document, *roofline.points_of(document)).splitlines()
    assert "4,000 GB/s (a read kernel), 800 TFLOP/s" in lines[1]
    gate_up = next(line for line in lines if line.startswith("  gate_up  "))
    assert gate_up.split()[1:] == ["25.0", "us", "3,680", "GB/s", "92%", "#" * 22 + ".."]
    assert [line for line in lines if not line.startswith(" ")][2:] == [
        "",
        "whole steps",
        "",
        "a decode step",
        "",
        "a prefill",
    ]


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Text that is not turned: words, left, top, right, bottom; letters no wider than roofline's own measure."""
    found = []
    for text in root.iter(f"{SVG}text"):
        if text.get("transform") is None:
            words, x, y = text.text or "", float(text.attrib["x"]), float(text.attrib["y"])
            width = 7.0 * len(words)
            left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", ""), 0.0)
            found.append((words, left, y - 10, left + width, y + 2))
    return found


def test_the_picture_is_small_whole_and_nothing_overlaps(roofline: ModuleType, document: dict[str, Any]) -> None:
    roof, points = roofline.points_of(document)
    picture = roofline.svg_of(document, roof, points)
    assert len(picture) < 60_000
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(picture)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = boxes(root)
    assert len([words for words, *_ in texts if words.isdigit() and len(words) < 3]) >= 2 * len(points)
    for words, left, top, right, bottom in texts:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, words
    for a, b in combinations(texts, 2):
        assert a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2], (a, b)
    marks = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    left, top, plot_width, plot_height = roofline.PLOT
    on_plot = [(x, y) for x, y in marks if x < roofline.LIST_LEFT]
    assert len(on_plot) == len(points)
    assert all(left <= x <= left + plot_width and top <= y <= top + plot_height for x, y in on_plot)
    for words, text_left, text_top, text_right, text_bottom in texts:
        if words.isdigit() and text_right < left + plot_width:
            assert not any(text_left < x < text_right and text_top < y < text_bottom for x, y in on_plot), words


def test_a_point_on_the_roof_is_drawn_on_it(roofline: ModuleType, document: dict[str, Any]) -> None:
    best = copy.deepcopy(document)
    best["rows"] = [row("operation", "best", 25.0, 1e8, 1e9)]  # 4,000 GB/s at 10 operations a byte
    roof, points = roofline.points_of(best)
    axes = roofline.Axes(roof, points)
    picture = roofline.svg_of(best, roof, points)
    path = re.search(r'class="roof" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L', picture)
    assert path is not None
    x0, y0, x1, y1 = map(float, path.groups())
    x, y = axes.at(points[0].intensity, points[0].rate)
    assert y == pytest.approx(y0 + (y1 - y0) * (x - x0) / (x1 - x0), abs=0.2)
    assert axes.at(1e-3 + roof.ridge, roof.dense)[1] == pytest.approx(y1, abs=0.2)


def test_the_command(
    roofline: ModuleType, document: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    file, out = tmp_path / "figures.json", tmp_path / "roof.svg"
    file.write_text(json.dumps(document))
    monkeypatch.setattr("sys.argv", ["roofline", str(file), "--svg", str(out)])
    roofline.main()
    assert "whole step: decode" in capsys.readouterr().out
    assert out.read_text().startswith("<svg")
    for content, wanted in (
        ("[]", "is not what"),
        ("no", "is not what"),
        (json.dumps({**document, "rows": []}), "no oper"),
    ):
        file.write_text(content)
        with pytest.raises(SystemExit, match=wanted):
            roofline.main()
