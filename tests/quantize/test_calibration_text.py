"""The shipped text, and how texts become windows of ids."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from localchat.errors import UserError
from localchat.quantize.calibration_text import SHIPPED, calibration_windows, documents, messages, report_windows

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + TEMPLATE[len("{% for m in messages %}") :]
)
CHAT = "=== chat\n[system]\nBe brief.\n[user]\nhi <|im_start|>\n\nthere\n[assistant]\nhello\n"


def files(template: str | None = TEMPLATE) -> dict[str, bytes]:
    """One token per byte, ids 0..255; <|im_start|> is 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    config = {"chat_template": template} if template else {}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def ids_of(tmp_path: Path, text: str, template: str | None = TEMPLATE) -> list[int]:
    path = tmp_path / "text"
    path.write_text(text + "=== text\n" + "x" * 64)
    return [i for window in calibration_windows(files(template), path) for i in window][:-64]


def test_the_shipped_text_is_of_many_kinds() -> None:
    found = documents(SHIPPED.read_text(encoding="utf-8"))
    chats = [messages(content) for kind, content in found if kind == "chat"]
    assert len(chats) > 15 and len(found) - len(chats) > 15
    for chat in chats:
        talk = [m for m in chat if m["role"] != "system"]
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2), talk
        assert all(m["content"] for m in chat)
    text = SHIPPED.read_text(encoding="utf-8")
    assert all(part in text for part in ("def ", "struct ", "SELECT", "的", "です", "ä", "й"))
    assert 60_000 < len(text.encode()) < 150_000


def test_nothing_of_the_report_is_calibrated_with() -> None:
    both = (calibration_windows(files()), report_windows(files()))
    calibrated, held = ([i for window in windows for i in window] for windows in both)
    pieces = {tuple(held[i : i + 60]) for i in range(0, len(held) - 60, 60)}
    seen = {tuple(calibrated[i : i + 60]) for i in range(len(calibrated) - 60)}
    assert len(pieces) > 50 and not pieces & seen


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    ids = ids_of(tmp_path, CHAT)
    assert ids.count(256) == 3  # the one that a message spells is text
    assert len(ids) > len("Be brief.hi <|im_start|>\n\ntherehello")


def test_a_template_without_system_prompts_gets_none(tmp_path: Path) -> None:
    assert ids_of(tmp_path, CHAT, NO_SYSTEM).count(256) == 2


def test_a_base_model_reads_the_chat_as_text(tmp_path: Path) -> None:
    *spoken, _ = ids_of(tmp_path, "Be brief.\n\nhi <|im_start|>\n\nthere\n\nhello\n", None)  # the last line's end
    assert ids_of(tmp_path, CHAT, None) == spoken
    assert 256 not in ids_of(tmp_path, CHAT, None)


def test_a_file_without_marks_is_one_text(tmp_path: Path) -> None:
    text = "a < b\n" * 400
    path = tmp_path / "text"
    path.write_text(text)
    windows = calibration_windows(files(), path)
    assert [len(w) for w in windows] == [1024, 1024, 352]
    assert report_windows(files(), path) == windows


def test_of_a_long_text_windows_from_all_over_it(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(chr(97 + i) * 1024 for i in range(10)))
    letters = [{w[0] for w in [window]} for window in calibration_windows(files(), path, 3 * 1024)]
    first = ids_of(tmp_path, "a")[0]
    assert [min(letter) - first for letter in letters] == [0, 3, 6]


@pytest.mark.parametrize(("content", "sentence"), [(b"short", "has 5 t"), (b"\xff" * 99, "UTF-8"), (None, "UTF-8")])
def test_refusals(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        calibration_windows(files(), path)
