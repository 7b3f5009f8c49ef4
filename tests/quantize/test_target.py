"""The output folder: nothing that is not ours is overwritten, removed or written into."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.errors import UserError
from localchat.quantize.convert import Recipe, convert
from localchat.quantize.target import partial_folder
from localchat.transfer import check_disk_space

Make = Callable[..., Any]
FINE = Recipe(group_size=32, symmetric=False)


def test_existing_folder_is_refused(make_hf: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        list(convert(make_hf(), tmp_path / "out", FINE))


@pytest.mark.parametrize("content", [{}, {"a.txt": "mine"}, {"config.json": '{"model_type": "llama"}'}])
def test_overwrite_spares_what_is_not_ours(make_hf: Make, tmp_path: Path, content: dict[str, str]) -> None:
    (tmp_path / "out").mkdir()
    for name, text in content.items():
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UserError, match="not a packed model folder"):
        list(convert(make_hf(), tmp_path / "out", FINE, overwrite=True))
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == content


def test_overwrite_replaces_a_packed_folder(make_hf: Make, tmp_path: Path) -> None:
    source, out = make_hf(), tmp_path / "out"
    list(convert(source, out, FINE, revision="first"))
    list(convert(source, out, FINE, revision="second", overwrite=True))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["source"]["revision"] == "second"
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


def test_failed_overwrite_leaves_the_old_one(make_hf: Make, tmp_path: Path) -> None:
    source, out = make_hf(), tmp_path / "out"
    list(convert(source, out, FINE))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    steps = convert(source, out, FINE, overwrite=True)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("out", ["source", "source/inside", "source/../source", "."])
def test_source_and_output_may_not_meet(make_hf: Make, tmp_path: Path, out: str) -> None:
    source = make_hf()
    before = {p.name for p in source.iterdir()}
    with pytest.raises(UserError, match="may not be the source"):
        list(convert(source, tmp_path / out, FINE, overwrite=True))
    assert {p.name for p in source.iterdir()} == before


def test_link_to_the_source_is_seen_through(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf()
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UserError, match="may not be the source"):
        list(convert(source, tmp_path / "link", FINE, overwrite=True))


def test_output_in_new_folders(make_hf: Make, tmp_path: Path) -> None:
    list(convert(make_hf(), tmp_path / "a" / "b" / "out", FINE))
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()


def test_left_over_of_a_killed_run_is_cleared(make_hf: Make, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "shard-00007").write_bytes(b"half")
    list(convert(make_hf(), tmp_path / "out", FINE))
    assert not (tmp_path / "out" / "shard-00007").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


def test_partial_folder_with_other_files_is_spared(make_hf: Make, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.docx").touch()
    with pytest.raises(UserError, match=r"holds thesis\.docx"):
        list(convert(make_hf(), tmp_path / "out", FINE))
    assert (tmp_path / "out.partial" / "thesis.docx").exists()


def test_two_conversions_at_once(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf()
    first = convert(source, tmp_path / "out", FINE)
    next(first)
    with pytest.raises(UserError, match="another process is writing"):
        list(convert(source, tmp_path / "out", FINE))
    list(first)
    assert (tmp_path / "out" / "config.json").is_file()


def test_partial_folder_goes_on_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), partial_folder(tmp_path / "out") as folder:
        (folder / "shard-00001").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_begun_leaves_no_folder_to_go_on_with(tmp_path: Path) -> None:
    for before_it_ends in ((), ("shard-00001",)):
        with pytest.raises(UserError), partial_folder(tmp_path / "out", resume=True) as folder:
            for name in before_it_ends:
                (folder / name).touch()
            raise UserError("the text is too short.")
        assert [path.name for path in tmp_path.rglob("shard-*")] == list(before_it_ends)
        assert (tmp_path / "out.partial").exists() == bool(before_it_ends)


def test_space_is_checked(tmp_path: Path) -> None:
    check_disk_space(tmp_path / "new" / "out", 1000)
    with pytest.raises(UserError, match=r"GB free, but 1000000000\.0 GB are needed"):
        check_disk_space(tmp_path / "new" / "out", 10**18)


def test_a_link_is_not_overwritten(make_hf: Make, tmp_path: Path) -> None:
    source, packed, link = make_hf(), tmp_path / "packed", tmp_path / "link"
    list(convert(source, packed, Recipe(group_size=32)))
    link.symlink_to(packed)
    with pytest.raises(UserError, match="is a link"):
        list(convert(source, link, Recipe(group_size=32), overwrite=True))
    assert link.is_symlink()
    assert (packed / "config.json").exists()
