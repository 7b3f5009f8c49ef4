"""Slash commands over a chat without a model."""

from types import SimpleNamespace
from typing import Any

import pytest

from localchat import parameters, slash
from localchat.chat import Chat
from localchat.errors import UsageError
from localchat.sampling import Sampling


@pytest.fixture
def chat() -> Chat:
    nothing: Any = None
    template: Any = SimpleNamespace(source="{{ enable_thinking }}")
    return Chat(nothing, nothing, template, Sampling(seed=5), system="Be brief.")


@pytest.fixture
def commands(chat: Chat) -> slash.SlashCommands:
    return slash.SlashCommands(chat, slash.About(info="the model", memory="the ledger"), seed_is_fixed=False)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("/set temp 0.25", "temperature", 0.25),
        ("/set parameter top_k 40", "top_k", 40),
        ("/set repeat_penalty 1.1", "repetition_penalty", 1.1),
        ("/set presence-penalty -1", "presence_penalty", -1.0),
        ("/set min_p 0.05", "min_p", 0.05),
        ("/set seed 9", "seed", 9),
    ],
)
def test_set_sampling(commands: slash.SlashCommands, chat: Chat, text: str, field: str, value: float) -> None:
    assert commands.run(text) is not None
    assert getattr(chat.sampling, field) == value
    assert commands.seed_is_fixed == (field == "seed")
    commands.run("/set top_p 0.5")
    assert commands.seed_is_fixed == (field == "seed")


def test_set_length_and_stop(commands: slash.SlashCommands, chat: Chat) -> None:
    commands.run("/set num_predict 12")
    commands.run("/set stop the end")
    assert (chat.max_tokens, chat.stop) == (12, ("the end",))
    commands.run("/set max_tokens -1")
    assert chat.max_tokens is None


def test_set_system_and_clear(commands: slash.SlashCommands, chat: Chat) -> None:
    chat.messages.append({"role": "user", "content": "x"})
    commands.run('/set system """Talk\nlike a pirate."""')
    assert (chat.system, chat.messages) == ("Talk\nlike a pirate.", [])
    chat.messages.append({"role": "user", "content": "x"})
    assert commands.run("/clear") == "cleared"
    assert (chat.system, chat.messages) == ("Talk\nlike a pirate.", [])


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "B", "interrupted": True},
    {"role": "user", "content": "/c"},
    {"role": "assistant", "content": "C"},
]


@pytest.mark.parametrize(
    ("text", "left", "said"),
    [("/undo", 4, "took back the last turn"), ("/undo 2", 2, "took back 2 turns"), ("/undo 3", 0, "took back 3 turns")],
)
def test_undo(commands: slash.SlashCommands, chat: Chat, text: str, left: int, said: str) -> None:
    chat.messages += TURNS
    assert commands.run(text) == said
    assert chat.messages == TURNS[:left]


def test_retry_and_edit_take_the_last_turn_back(commands: slash.SlashCommands, chat: Chat) -> None:
    chat.messages += TURNS
    assert commands.run("/retry") == slash.Retry("/c", TURNS[4:])
    assert commands.run("/regen") == slash.Retry("b", TURNS[2:4])
    assert commands.run("/edit") == slash.Edit("a", replaces=True)
    assert chat.messages == TURNS[:2]  # until the edited message is sent


def test_what_can_be_shown_and_switched(commands: slash.SlashCommands) -> None:
    assert commands.run(" /set verbose") == slash.Verbose(True)
    assert commands.run("/set quiet") == commands.run("/set verbose off") == slash.Verbose(False)
    assert commands.run("/set think off") == "the model is asked not to think"
    assert commands.run("/set kv_cache int8") == commands.run("/set parameter kv-cache int8") == slash.KeepAs("int8")


def test_thinking_is_asked_for_and_shown(commands: slash.SlashCommands, chat: Chat) -> None:
    for text, value, shown in (("/set think", True, "on"), ("/set nothink", False, "off")):
        commands.run(text)
        assert chat.template_variables == {"enable_thinking": value}
        assert f"think              {shown}" in str(commands.run("/show parameters"))


def test_thinking_with_an_effort_or_a_budget(commands: slash.SlashCommands, chat: Chat) -> None:
    chat.template.source += "{{ reasoning_effort }}"
    assert commands.run("/set think low") == "the model is asked to think first, with low effort"
    assert chat.template_variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert commands.run("/set think 1") == "the model is asked to think first, for at most 1 token"
    assert (chat.template_variables, chat.think_budget) == ({"enable_thinking": True}, 1)
    assert "on, at most 1 token " in str(commands.run("/set"))
    assert commands.run("/set nothink") == "the model is asked not to think"
    assert (chat.template_variables, chat.think_budget) == ({"enable_thinking": False}, None)


def test_a_template_that_does_not_heed_it(commands: slash.SlashCommands, chat: Chat) -> None:
    knows_none = "this model's chat template knows no efforts"
    assert commands.run("/set think high") == f"/set think high is /set think here: {knows_none}"
    chat.template.source = ""
    has_none = "this model's chat template has no switch for thinking"
    assert commands.run("/set nothink") == f"/set nothink changes nothing: {has_none}"
    assert commands.run("/set think") == f"/set think changes nothing: {has_none}"
    assert commands.run("/set think 7") == "the model is asked to think first, for at most 7 tokens"


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("/undo", "there is no turn to take back.", ""),
        ("/undo x", "/undo takes a number of turns, not 'x'.", ""),
        ("/retry", "there is no turn to take back.", ""),
        ("/edit now", "/edit takes no argument.", ""),
        ("/set think hard", "'hard' is not on, off, low, medium, high or a number of tokens", ""),
        ("/set nothink 5", "there is no parameter 'nothink'.", ""),
        ("/hepl", "there is no command '/hepl'.", "did you mean /help?"),
        ("/Set temp 1", "there is no command '/Set'.", "did you mean /set?"),
        ("/etc/passwd holds", "there is no command '/etc/passwd'.", "/help lists"),
        ("/set temp", "/set temperature needs a value.", ""),
        ("/set temp 1e9", "temperature is 1000000000.0, it must be", ""),
        ("/set top_k 1.5", "top_k is '1.5', wanted a whole number.", ""),
        ("/set kv_cache fp8", "kv_cache is 'fp8', wanted bf16 or int8.", ""),
        ("/set kv_cache", "/set kv_cache needs a value.", "try: /set kv_cache int8"),
        ("/set tempp 1", "there is no parameter 'tempp'.", "did you mean temp?"),
        ("/show nothing", "there is nothing called 'nothing' to show.", "info, parameters, system, template, memory"),
    ],
)
def test_what_is_not_understood_changes_nothing(
    commands: slash.SlashCommands, chat: Chat, text: str, sentence: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        commands.run(text)
    assert sentence in str(caught.value)
    assert hint in caught.value.hint
    assert chat.sampling == Sampling(seed=5)


def test_values_are_listed(commands: slash.SlashCommands) -> None:
    commands.run("/set top_k 7")
    shown = commands.run("/set")
    assert shown == commands.run("/show parameters")
    rows = {line.split()[0]: line.split(maxsplit=1)[1].split("  ") for line in str(shown).splitlines()}
    shown_of = {name: (cells[0], cells[-1].strip()) for name, cells in rows.items()}
    assert shown_of["top_k"] == ("7", "/set")
    assert shown_of["seed"] == ("drawn for each reply", "built-in")
    assert shown_of["max_tokens"] == ("not set", "built-in")
    assert shown_of["temperature"] == ("0.7", "built-in")


def test_values_are_listed_with_where_they_are_from(chat: Chat) -> None:
    origins = {"temperature": "flag", "think": "LOCALCHAT_THINK", "top_p": "/a\x1b[1m/config.toml, line 3"}
    about = slash.About("the model", "the ledger", origins, fixed=(("ctx", 8192, "flag"), ("vram", None, "built-in")))
    chat.template_variables = parameters.think_variables("high")
    commands = slash.SlashCommands(chat, about, seed_is_fixed=True)
    rows = [line.split() for line in str(commands.run("/show parameters")).splitlines()]
    assert ["temperature", "0.7", "flag"] in rows
    assert ["think", "high", "LOCALCHAT_THINK"] in rows
    assert ["top_p", "0.95", "/a^[[1m/config.toml,", "line", "3"] in rows
    assert ["seed", "5", "built-in"] in rows
    assert rows[-2:] == [["ctx", "8192", "flag"], ["vram", "not", "set", "built-in"]]
    for name in ("ctx", "parameter num_ctx"):  # the latter is Ollama's
        with pytest.raises(UsageError, match="ctx cannot be set in a chat") as caught:
            commands.run(f"/set {name} 4096")
        assert caught.value.hint == "leave it and go on with -C --ctx VALUE."
    commands.run("/set nothink")
    assert chat.template_variables == {"enable_thinking": False}
    assert ["think", "off", "/set"] in [line.split() for line in str(commands.run("/set")).splitlines()]


def test_show(commands: slash.SlashCommands, chat: Chat) -> None:
    assert commands.run("/show") == commands.run("/show info") == "the model"
    assert commands.run("/show memory") == "the ledger"
    chat.system = "a\x1b[1m"
    assert commands.run("/show system") == "a^[[1m"


@pytest.mark.parametrize("text", ["/bye", "/exit", "/quit "])
def test_leaving(commands: slash.SlashCommands, text: str) -> None:
    assert commands.run(text) is None


def test_help_names_every_command(commands: slash.SlashCommands) -> None:
    assert all(name in str(commands.run("/help")) for name in slash.NAMES)
    assert max(map(len, slash.HELP.splitlines())) < 80


@pytest.mark.parametrize(
    ("text", "command", "message"), [("/x", True, "/x"), ("//x", False, "/x"), ("x/", False, "x/")]
)
def test_a_doubled_slash_is_text(text: str, command: bool, message: str) -> None:
    assert slash.is_command(text) is command
    assert slash.unescaped(text) == message


@pytest.mark.parametrize("turns", [0, 4])
def test_undoing_more_than_there_is_changes_nothing(commands: slash.SlashCommands, chat: Chat, turns: int) -> None:
    chat.messages += TURNS
    with pytest.raises(UsageError, match=f"has 3 turns, so {turns} cannot"):
        commands.run(f"/undo {turns}")
    assert chat.messages == TURNS


@pytest.mark.parametrize("text", ["/x", "x/", "//x", "", "x"])
def test_what_is_typed_for_a_message(text: str) -> None:
    assert slash.unescaped(slash.escaped(text)) == text
    assert not slash.is_command(slash.escaped(text))


def test_leaving_takes_no_argument(commands: slash.SlashCommands) -> None:
    with pytest.raises(UsageError, match="takes no argument"):
        commands.run("/bye for now")
    assert commands.run("/bye") is None


def test_what_was_set_is_collected(commands: slash.SlashCommands) -> None:
    for text in ("/set temp 0.5", "/set stop END", "/set max_tokens -1", "/set nothink", "/set system Be kind."):
        commands.run(text)
    assert commands.chosen == {
        "temperature": 0.5, "stop": ["END"], "max_tokens": None, "think": False, "system": "Be kind.",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["/save", "/load x", "/sessions"])
def test_without_saved_conversations(commands: slash.SlashCommands, text: str) -> None:
    with pytest.raises(UsageError, match="is not saved"):
        commands.run(text)


def test_continue(commands: slash.SlashCommands) -> None:
    assert commands.run("/continue") == slash.Continue()
    with pytest.raises(UsageError, match="takes no argument"):
        commands.run("/continue now")
