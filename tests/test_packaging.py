"""What gets installed: only `localchat`, whole, with `kernels` and `quantize` inside; and what importing it costs."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml's [project]."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The members of a wheel built from a copy of the tree (a build leaves traces in its tree)."""
    tree, out = tmp_path_factory.mktemp("tree") / "copy", tmp_path_factory.mktemp("wheel")
    tree.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in ("localchat", "kernels", "quantize"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def run(code: str, **options: Any) -> str:
    """What a fresh interpreter prints; its errors fail the test."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_adds_one_name_to_an_environment(wheel_names: set[str]) -> None:
    top = {re.sub(r"-[\d.]+\.dist-info$", ".dist-info", name.partition("/")[0]) for name in wheel_names}
    assert top == {"localchat", "localchat.dist-info"}


def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    wanted = {f"localchat/{path.name}" for path in (ROOT / "localchat").glob("*.py")}
    for folder in ("kernels", "quantize"):
        wanted |= {f"localchat/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    assert wanted
    assert wanted <= wheel_names


@pytest.mark.parametrize("name", ["kernels", "quantize"])
def test_links_resolve(name: str) -> None:
    link = ROOT / "localchat" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    assert not (ROOT / name / "__init__.py").exists(), "transformers would import it as PyPI's package `kernels`"


def test_transformers_imports_from_the_repository_root() -> None:
    code = "import sys; sys.path.insert(0, ''); import transformers; from transformers import LlamaConfig; print('ok')"
    assert run(code, cwd=ROOT) == "ok"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["--no-such-option"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from localchat.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'gguf', 'huggingface_hub', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(code).splitlines()[-1] == "[]"


def test_dependencies_have_ranges_and_no_pins(project: dict[str, Any]) -> None:
    for requirement in project["dependencies"]:
        assert re.match(r"[\w-]+>=\d", requirement), requirement
        assert "==" not in requirement.partition(";")[0], requirement


def test_what_is_tested_is_pinned(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if re.fullmatch(r"[\w-]+==[\d.]+", line)}
    assert {"torch", "triton"} <= pinned
    assert pinned <= {re.split(r"[><=;\s]", requirement)[0] for requirement in project["dependencies"]}


def test_transformers_is_for_tests_only(project: dict[str, Any]) -> None:
    assert not any(requirement.startswith("transformers") for requirement in project["dependencies"])
    assert any(requirement.startswith("transformers") for requirement in project["optional-dependencies"]["test"])


def test_versions_agree(project: dict[str, Any]) -> None:
    assert run("import localchat; print(localchat.__version__)") == project["version"]


@pytest.mark.parametrize("name", ["setup", "demo", "test"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111 == 0o111
    assert b"\r" not in script.read_bytes()
    subprocess.run(["bash", "-n", str(script)], check=True)
