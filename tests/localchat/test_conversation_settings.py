"""What a conversation keeps of its settings, and what has precedence over it."""

from typing import Any

import pytest

from localchat import conversation_settings as room
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
    "settings",
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
def test_what_makes_none_is_left_out(settings: dict[str, Any]) -> None:
    assert room.stored(settings) == {}


def test_a_flag_has_precedence_and_the_model_s_defaults_stand_below() -> None:
    args = parse_command_line(["run", "x", "--temp", "0.9", "-n", "3"])
    chat = Chat(NOTHING, NOTHING, NOTHING, Sampling())
    own = room.adopted(args, SAVED)
    room.apply(chat, own, {"temperature": 0.1, "top_k": 7})
    assert (chat.sampling.temperature, chat.sampling.top_k, chat.sampling.seed) == (0.9, 7, 5)
    assert (chat.system, chat.max_tokens, chat.stop) == ("S", 3, ("END",))
    assert chat.template_variables == {"enable_thinking": False}
    assert room.chosen_by(args) == {"temperature": 0.9, "max_tokens": 3}
    assert room.chosen(args, SAVED) == {**SAVED, "temperature": 0.9, "max_tokens": 3}
    assert room.chosen(args, {"temperature": "hot", "top_k": 2}) == {"temperature": 0.9, "max_tokens": 3, "top_k": 2}
