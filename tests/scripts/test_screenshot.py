"""scripts/screenshot: the picture shows what the screen shows, and the one in the README is such a picture."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pyte
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def screenshot() -> ModuleType:
    loader = SourceFileLoader("screenshot", str(ROOT / "scripts" / "screenshot"))
    spec = importlib.util.spec_from_loader("screenshot", loader)
    if spec is None:
        raise ImportError("scripts/screenshot")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_screens_text_and_colours_are_kept(screenshot: ModuleType) -> None:
    screen = pyte.Screen(20, 5)
    pyte.ByteStream(screen).feed(
        screenshot._DIM.sub(b"\x1b[90\\1", b">>> hi\r\n\r\n\x1b[1;31mred\x1b[0m \x1b[2mdim\x1b[0m")
    )
    text = screenshot.picture(screen)
    assert text.plain == ">>> hi\n\nred dim"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert (styles["red"].color.name, styles["red"].bold) == ("red", True)
    assert styles["dim"].color.name == "bright_black"


def test_the_readmes_picture_is_small_and_asks_the_web_for_nothing(screenshot: ModuleType) -> None:
    picture = (ROOT / "docs" / "chat.svg").read_text()
    assert "docs/chat.svg" in (ROOT / "README.md").read_text()
    assert len(picture) < 100_000
    assert "url(" not in picture.replace("url(#", "")
    assert "tok/s" in picture
