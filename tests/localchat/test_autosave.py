"""Whatever happens to a chat's messages, its file says the same afterwards."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localchat import autosave as room
from localchat import conversations
from localchat.autosave import Autosave
from localchat.chat import Chat, Chunk
from localchat.errors import UsageError, UserError
from localchat.sampling import Sampling
from localchat.stats import Stats

NOTHING: Any = None


def turn(n: int, **flags: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}", **flags}]


@pytest.fixture
def chat() -> Chat:
    return Chat(NOTHING, NOTHING, NOTHING, Sampling())


@pytest.fixture
def autosave(chat: Chat) -> Iterator[Autosave]:
    saved = Autosave("tiny", {"temperature": 0.5})
    saved.attach(chat)
    yield saved
    saved.close()


def in_file(autosave: Autosave) -> list[dict[str, Any]]:
    messages = conversations.load(autosave.name).messages
    return [{key: value for key, value in message.items() if key != "at"} for message in messages]


def test_nothing_is_written_before_the_first_turn(autosave: Autosave, chat: Chat, _private_home: Path) -> None:
    autosave.save()
    assert autosave.name == ""
    assert not (_private_home / ".local").exists()
    chat.messages += turn(1)
    autosave.save()
    folder = _private_home / ".local/state/localchat/conversations"
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    conversation = conversations.load(autosave.name)
    assert (conversation.model, conversation.settings) == ("tiny", {"temperature": 0.5})
    assert conversations.is_automatic(autosave.name)


def test_the_file_follows(autosave: Autosave, chat: Chat) -> None:
    steps: list[Any] = [
        lambda m: m.extend(turn(1)),
        lambda m: m.extend(turn(2, interrupted=True)),
        lambda m: m.__setitem__(3, {"role": "assistant", "content": "a2 and more", "reasoning_content": "hm"}),
        lambda m: m.extend(turn(3)),
        lambda m: m.__delitem__(slice(0, 2)),  # dropped
        lambda m: m.__delitem__(slice(2, 4)),  # taken back
        lambda m: m.extend(turn(1) + turn(1)),
        lambda m: m.__delitem__(slice(0, 4)),
        lambda m: m.__setitem__(0, {"role": "user", "content": "edited in place"}),
        lambda m: m.clear(),
        lambda m: m.extend(turn(4)),
    ]
    for step in steps:
        step(chat.messages)
        autosave.save()
        assert in_file(autosave) == chat.messages
        size = autosave._file.path.stat().st_size  # type: ignore[union-attr]
        autosave.save()
        assert autosave._file.path.stat().st_size == size  # type: ignore[union-attr]


def test_dropping_costs_one_short_line(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1) + turn(2) + turn(3)
    autosave.save()
    times = [message["at"] for message in conversations.load(autosave.name).messages]
    del chat.messages[:4]
    autosave.save()
    last = json.loads(conversations.path_of(autosave.name).read_text().splitlines()[-1])
    assert (last["start"], last["keep"], last["add"]) == (4, 2, [])
    assert [message["at"] for message in conversations.load(autosave.name).messages] == times[4:]


def test_one_that_was_emptied_keeps_its_settings(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1)
    autosave.rename("mine")
    chat.clear()
    autosave.start_anew()
    for _ in range(2):
        autosave.close()
        opened = autosave.open("mine")
        assert opened is not None
        assert (opened.messages, opened.settings) == ([], {"temperature": 0.5})


def chunks(chat: Chat, *pieces: tuple[str, str], question: str = "q") -> Iterator[Chunk]:
    """A reply as Chat.reply makes it."""
    kept = len(chat.messages)
    chat.messages.append({"role": "user", "content": question})
    try:
        yield Chunk("prefill", "", Stats())
        for kind, text in pieces:
            yield Chunk(kind, text, Stats())  # type: ignore[arg-type]
    except BaseException:
        del chat.messages[kept:]
        raise
    chat.messages.append({"role": "assistant", "content": "yes"})
    yield Chunk("end", "", Stats())


def test_a_turn_is_in_the_file_while_it_runs(autosave: Autosave, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PIECE_SECONDS", 0.0)
    recorded = autosave.record("q", chunks(chat, ("thought", "h"), ("thought", "m"), ("answer", "ye"), ("answer", "s")))
    next(recorded)
    conversation = conversations.load(autosave.name)
    assert (conversation.messages, conversation.unanswered) == ([], "q")
    for _ in range(3):
        next(recorded)
    _, answer = in_file(autosave)
    assert answer == {"role": "assistant", "content": "ye", "reasoning_content": "hm", "interrupted": True}
    list(recorded)
    assert in_file(autosave) == chat.messages
    assert not conversations.load(autosave.name).pending


def test_a_turn_that_leaves_nothing(autosave: Autosave, chat: Chat) -> None:
    recorded = autosave.record("q", chunks(chat, ("answer", "x")))
    next(recorded)
    recorded.close()  # type: ignore[attr-defined]
    assert chat.messages == []
    assert conversations.load(autosave.name).unanswered == ""


def test_a_turn_that_was_refused_writes_nothing(autosave: Autosave, _private_home: Path) -> None:
    def refused() -> Iterator[Chunk]:
        raise UsageError("no")
        yield

    with pytest.raises(UsageError):
        list(autosave.record("q", refused()))
    assert not (_private_home / ".local").exists()


def test_a_full_disk_is_told_once_and_made_up_for(
    autosave: Autosave, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.messages += turn(1)
    autosave.save()
    with monkeypatch.context() as patch:
        patch.setattr(autosave._file, "append", _full)
        chat.messages += turn(2)
        autosave.save()
        assert autosave.fault == "the conversation cannot be saved at the moment (No space left on device)"
        autosave.fault = ""
        assert len(list(autosave.record("q", chunks(chat)))) == 2
        assert autosave.fault == ""
    autosave.save()
    assert in_file(autosave) == chat.messages
    assert len(chat.messages) == 6


def _full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_name_is_given_and_a_second_one_makes_a_copy(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1)
    autosave.save()
    assert autosave.rename("first") is False
    assert [row.name for row in conversations.listing()] == ["first"]
    times = [message["at"] for message in conversations.load("first").messages]
    assert autosave.rename("second") is True
    chat.messages += turn(2)
    autosave.save()
    assert conversations.load("first").turns == 1
    assert in_file(autosave) == chat.messages
    assert [message["at"] for message in conversations.load("second").messages][:2] == times
    with pytest.raises(UsageError, match="there is a conversation 'first' already"):
        autosave.rename("first")
    assert autosave.rename("second") is False
    assert autosave.name == "second"


def test_clearing_leaves_one_without_a_name_and_empties_one_with(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1)
    autosave.save()
    first = autosave.name
    chat.clear()
    assert autosave.start_anew() == first
    chat.messages += turn(2)
    autosave.save()
    assert autosave.name != first
    assert conversations.load(first).turns == 1
    autosave.rename("mine")
    chat.clear()
    assert autosave.start_anew() == ""
    assert in_file(autosave) == []
    assert autosave.name == "mine"


def test_another_conversation_is_opened(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1)
    autosave.rename("one")
    second = Autosave("other", {})
    assert second.open("two", create=True) is None
    with pytest.raises(UserError, match="the conversation one is open in another process"):
        second.open("one")
    with pytest.raises(UsageError, match="two is this conversation"):
        second.open("two")
    assert second.name == "two"
    second.close()
    with pytest.raises(UsageError, match="no saved conversation 'two'"):  # nothing was said in it
        autosave.open("two")
    assert autosave.name == "one"
    autosave.close()
    opened = second.open("one")
    assert opened is not None
    other = Chat(NOTHING, NOTHING, NOTHING, Sampling())
    second.attach(other, opened)
    assert other.messages == turn(1)
    other.messages += turn(2)
    second.save()
    assert conversations.load("one").model == "other"
    second.close()


def test_a_torn_line_is_cut_away(autosave: Autosave, chat: Chat) -> None:
    chat.messages += turn(1)
    autosave.rename("one")
    autosave.close()
    path = conversations.path_of("one")
    with path.open("a") as file:
        file.write('{"at": "2026", "sta')
    opened = autosave.open("one")
    assert opened is not None and opened.torn
    autosave.attach(chat, opened)
    chat.messages += turn(2)
    autosave.save()
    assert in_file(autosave) == turn(1) + turn(2)
    assert not conversations.load("one").torn


def test_a_message_without_an_answer_waits_until_something_is_done(autosave: Autosave, chat: Chat) -> None:
    recorded = autosave.record("q", chunks(chat, ("answer", "x")))
    next(recorded)
    name = autosave.name
    chat.messages.clear()
    autosave.close()  # as if the process had ended here
    for _ in range(2):
        opened = autosave.open(name)
        assert opened is not None and opened.unanswered == "q"
        autosave.attach(chat, opened)
        autosave.close()
