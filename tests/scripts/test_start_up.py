"""scripts/start_up: when the first word comes, when the last, and what is no answer."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TALKS = "import sys, time; print('hello', flush=True); time.sleep(1); print('load duration:   0.250s', file=sys.stderr)"


def test_the_first_byte_is_not_the_end(script: Callable[[str], ModuleType]) -> None:
    found = script("start_up").run([sys.executable, "-c", TALKS])
    assert found.end - found.first > 0.9
    assert found.loading == 0.25


@pytest.mark.parametrize(
    "program", [TALKS + "; sys.exit(1)", TALKS.replace("print('hello', flush=True)", "0"), "print('hello')"]
)
def test_what_is_no_answer_ends_it(script: Callable[[str], ModuleType], program: str) -> None:
    """A failure, silence, and nothing about loading."""
    with pytest.raises(SystemExit, match="gave no answer"):
        script("start_up").run([sys.executable, "-c", program])


def test_the_run_that_compiles_is_apart(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, commands, figures = script("start_up"), [], tmp_path / "figures.json"
    times = iter([17.0, 6.0, 7.0, 9.0])

    def run(command: list[str]) -> object:
        commands.append(command)
        return module.Run(first := next(times), first + 1, 2.5)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(sys, "argv", ["start_up", "folder", "--vram", "24", "--json", str(figures)])
    module.main()
    assert capsys.readouterr().out.endswith("median but for the first: 7.00, 8.00, 2.50 s\n")
    assert json.loads(figures.read_text())["median"] == {"first": 7.0, "end": 8.0, "loading": 2.5}
    assert all(
        command[2:5] == ["localchat", "run", "folder"] and command[-2:] == ["--vram", "24"] for command in commands
    )
