"""Which value of a parameter counts, and which are refused."""

import pytest

from localchat import parameters
from localchat.errors import BadCheckpoint, UsageError
from localchat.sampling import Sampling
from localchat.values import Think


def test_flag_over_model_over_built_in() -> None:
    built_in = parameters.sampling_for({"seed": 1}, {"bos_token_id": 1})
    assert built_in == Sampling(temperature=0.7, top_p=0.95, seed=1)
    model = parameters.sampling_for({"seed": 1}, {"do_sample": True, "temperature": 0.6, "top_k": 20})
    assert model == Sampling(temperature=0.6, top_k=20, top_p=0.95, seed=1)
    assert parameters.sampling_for({"temperature": 1.5, "seed": 1}, {"temperature": 0.6}).temperature == 1.5


def test_a_greedy_model_stays_greedy_unless_told_otherwise() -> None:
    assert parameters.sampling_for({}, {"do_sample": False, "temperature": 0.6}).temperature == 0
    assert parameters.sampling_for({"temperature": 0.3}, {"do_sample": False}).temperature == 0.3


def test_seeds_are_drawn() -> None:
    assert len({parameters.sampling_for({}, {}).seed for _ in range(5)}) == 5
    assert parameters.sampling_for({"seed": 0}, {}).seed == 0


def test_a_bad_generation_config_is_named() -> None:
    with pytest.raises(BadCheckpoint, match=r"generation_config\.json: top_p is 7"):
        parameters.sampling_for({}, {"top_p": 7})


@pytest.mark.parametrize(
    ("name", "text"),
    [("temp", "nan"), ("temp", "-1"), ("top_p", "1.1"), ("seed", "x"), ("max_tokens", "0"), ("stop", "")],
)
def test_values_out_of_range(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        parameters.parse(parameters.find(name), text)


def test_names_lead_to_one_parameter_each() -> None:
    assert len(parameters.NAMES) == sum(len(p.names) for p in parameters.PARAMETERS)
    assert parameters.find("Top-P").field == "top_p"


def test_where_values_are_from() -> None:
    model = {"temperature": 0.6, "top_k": 20, "top_p": "wrong", "seed": 3, "min_p": True}
    origins = parameters.sampling_origins({"top_k": "flag", "ctx": "flag"}, model)
    assert (origins["top_k"], origins["temperature"], origins["ctx"]) == ("flag", "generation_config.json", "flag")
    assert {origins[name] for name in ("top_p", "seed", "min_p", "stop", "max_tokens")} == {"built-in"}
    assert parameters.sampling_origins({}, {"do_sample": False})["temperature"] == "generation_config.json"


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (300, {"enable_thinking": True}),
    ],
)
def test_what_the_template_is_told_about_thinking(think: Think | None, variables: dict[str, object]) -> None:
    assert parameters.think_variables(think) == variables


def test_a_table_keeps_its_columns_and_hides_no_control_character() -> None:
    text = parameters.table([("a", 1, "flag"), ("b", None, "built-in"), ("c", "x\x1b[1m", "/p\x07")])
    assert text.splitlines() == [
        "a                  1        flag",
        "b                  not set  built-in",
        "c                  x^[[1m   /p^G",
    ]
