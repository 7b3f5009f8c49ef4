"""What a conversation's file says, also where its writer was stopped, and who may write it."""

import json
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from localchat import conversation_file as room
from localchat.errors import UserError

AT = "2026-01-02T03:04:05+00:00"
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def written(tmp_path: Path, *lines: dict[str, Any], rest: str = "") -> room.Conversation:
    first = {"localchat": 1, "at": AT}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)) + rest)
    return room.read(path)


def said(conversation: room.Conversation) -> list[str]:
    assert all(message.pop("at") for message in conversation.messages)
    return [message["content"] for message in conversation.messages]


def change(start: int, keep: int, *add: dict[str, Any]) -> dict[str, Any]:
    return {"at": AT, "start": start, "keep": keep, "add": list(add)}


def begin(keep: int, message: dict[str, Any] | None) -> dict[str, Any]:
    return {"at": AT, "keep": keep, "begin": message}


def turn(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]


def test_changes_are_applied_in_order(tmp_path: Path) -> None:
    lines = [
        {"at": AT, "model": "m", "settings": {"temperature": 0.5}},
        change(0, 0, *turn(1)),
        change(0, 2, *turn(2)),
        change(0, 4, *turn(3)),
        change(2, 4),  # the oldest turn is dropped
        change(0, 2, *turn(4)),  # the last one is taken back, another asked
    ]
    conversation = written(tmp_path, *lines)
    assert (conversation.created, conversation.model, conversation.settings) == (AT, "m", {"temperature": 0.5})
    assert conversation.turns == 2
    assert said(conversation) == ["q2", "a2", "q4", "a4"]
    assert not conversation.torn and not conversation.pending


@pytest.mark.parametrize(
    ("lines", "texts", "unanswered"),
    [
        ([begin(2, USER)], ["q1", "a1"], "q"),
        ([begin(2, USER), {"thought": "h"}, {"thought": "m"}, {"answer": "An"}], ["q1", "a1", "q", "An"], ""),
        ([begin(0, USER)], ["q1", "a1"], ""),  # a retry that had not begun: the earlier answer stays
        ([begin(0, USER), {"answer": "An"}], ["q", "An"], ""),
        ([begin(2, None)], ["q1", "a1"], ""),
        ([begin(2, None), {"answer": "-more"}], ["q1", "a1-more"], ""),
        ([begin(2, USER), {"answer": "An"}, change(0, 2)], ["q1", "a1"], ""),
        ([begin(2, USER), {"answer": "x"}, change(0, 2), begin(2, USER), {"answer": "y"}], ["q1", "a1", "q", "y"], ""),
    ],
)
def test_an_answer_that_was_being_written(
    tmp_path: Path, lines: list[dict[str, Any]], texts: list[str], unanswered: str
) -> None:
    conversation = written(tmp_path, change(0, 0, *turn(1)), *lines)
    assert conversation.unanswered == unanswered
    assert bool(conversation.messages[-1].get("interrupted")) == any("answer" in line for line in lines[-1:])
    assert said(conversation) == texts
    if {"thought": "h"} in lines:
        assert conversation.messages[-1]["reasoning_content"] == "hm"
    assert [message["content"] for message in conversation.settled] == ["q1", "a1"]


def test_a_line_that_was_cut_off_is_left_out_at_every_byte(tmp_path: Path) -> None:
    last = json.dumps(change(0, 2, *turn(2)))
    for cut in range(1, len(last)):
        conversation = written(tmp_path, change(0, 0, *turn(1)), rest=last[:cut])
        assert conversation.torn
        assert conversation.size == (tmp_path / "x.jsonl").stat().st_size - cut
        assert said(conversation) == ["q1", "a1"]
    assert written(tmp_path, rest="\0\0\0\n").torn  # a block that never reached the disk


@pytest.mark.parametrize(
    "line",
    [
        {"at": AT, "start": 0, "keep": 0, "add": [{"role": "system", "content": "x"}]},
        {"at": AT, "start": 0, "keep": 0, "add": [{"role": "user", "content": 5}]},
        {"at": AT, "start": 0, "keep": 0, "add": [{"role": "user", "content": "x", "reasoning_content": []}]},
        {"at": AT, "start": 0, "keep": "x", "add": []},
        {"other": "x"},
        {},
        {"answer": 3},
    ],
)
def test_damage_before_the_last_line_is_named(tmp_path: Path, line: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"line 2 of .*x\.jsonl is damaged"):
        written(tmp_path, line, change(0, 0, *turn(1)))


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"localchat": 2, "at": "now"}\n')
    with pytest.raises(UserError, match="newer version"):
        room.read(tmp_path / "x.jsonl")


def test_a_file_is_private_and_its_lines_are_whole(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = room.ConversationFile(tmp_path / "x.jsonl", create=True)
    finally:
        os.umask(before)
    file.change(0, 0, [USER, ANSWER])
    assert stat.S_IMODE((tmp_path / "x.jsonl").stat().st_mode) == 0o600
    assert said(room.read(tmp_path / "x.jsonl")) == ["q", "a"]
    file.close()
    with pytest.raises(FileExistsError):
        room.ConversationFile(tmp_path / "x.jsonl", create=True)


def test_what_could_not_be_written_whole_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = room.ConversationFile(tmp_path / "x.jsonl", create=True)
    before = (tmp_path / "x.jsonl").read_bytes()
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(fd, bytes(data[:10]))

    with monkeypatch.context() as patch:
        patch.setattr(room.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.change(0, 0, [USER])
    assert (tmp_path / "x.jsonl").read_bytes() == before
    file.change(0, 0, [USER])
    assert said(room.read(tmp_path / "x.jsonl")) == ["q"]


def _try(path: Path, answer: Any) -> None:
    try:
        room.ConversationFile(path).close()
        answer.put("")
    except room.InUse as error:
        answer.put(str(error))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()

    def other() -> str:
        process = context.Process(target=_try, args=(tmp_path / "y.jsonl", answer))
        process.start()
        process.join()
        return str(answer.get(timeout=30))

    file = room.ConversationFile(tmp_path / "x.jsonl", create=True)
    file.rename(tmp_path / "y.jsonl")  # the lock goes with it
    assert other() == "the conversation y is open in another process."
    file.close()
    assert other() == ""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("{}\n")
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic"):
        room.ConversationFile(tmp_path / "x.jsonl")
