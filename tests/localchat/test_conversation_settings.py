"""What a conversation keeps of its settings, and what has precedence over it."""

from pathlib import Path
from typing import Any

import pytest

from localchat import conversation_settings as room
from localchat import settings
from localchat.arguments import parse_command_line
from localchat.chat import Chat
from localchat.sampling import Sampling

NOTHING: Any = None
SAVED = {"temperature": 0.5, "max_tokens": 9, "stop": ["END"], "system": "S", "think": False, "seed": 5}


def test_what_makes_sense_is_taken() -> None:
    assert room.stored(SAVED) == SAVED
    assert room.stored({"max_tokens": None, "system": None, "think": "high"}) == {
        "max_tokens": None, "system": None, "think": "high",
    }  # fmt: skip


@pytest.mark.parametrize(
    "saved",
    [
        {"temperature": "hot"},
        {"temperature": 1e9},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"stop": "END"},
        {"stop": [""]},
        {"system": ["S"]},
        {"model": "/etc"},
        {"color": "on"},
    ],
)
def test_what_makes_none_is_left_out(saved: dict[str, Any]) -> None:
    assert room.stored(saved) == {}


def test_a_flag_has_precedence_and_the_model_s_defaults_stand_below() -> None:
    args = parse_command_line(["run", "x", "--temp", "0.9", "-n", "3"])
    chat = Chat(NOTHING, NOTHING, NOTHING, Sampling())
    own = room.adopted(args, SAVED, "x")
    room.apply(chat, own, {"temperature": 0.1, "top_k": 7})
    assert (chat.sampling.temperature, chat.sampling.top_k, chat.sampling.seed) == (0.9, 7, 5)
    assert (chat.system, chat.max_tokens, chat.stop) == ("S", 3, ("END",))
    assert chat.template_variables == {"enable_thinking": False}
    assert room.chosen_by(args) == {"temperature": 0.9, "max_tokens": 3}
    assert room.chosen_by(own) == {**SAVED, "temperature": 0.9, "max_tokens": 3}


def test_the_environment_stands_above_and_the_config_below(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALCHAT_TEMP", "0.2")
    (tmp_path / "localchat").mkdir()
    (tmp_path / "localchat" / "config.toml").write_text("temp = 0.1\nseed = 1\nmin_p = 0.3\n")
    args = parse_command_line(["run", "x"])
    settings.complete(args)
    assert room.chosen_by(args) == {}  # neither is a choice of this conversation
    own = room.adopted(args, {"temperature": 0.8, "seed": 8}, "mine")
    assert (own.temperature, own.seed, own.min_p) == (0.2, 8, 0.3)
    assert (own.origins["temperature"], own.origins["seed"]) == ("LOCALCHAT_TEMP", "session mine")
    assert room.chosen_by(own) == {"seed": 8}
