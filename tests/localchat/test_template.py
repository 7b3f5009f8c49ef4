"""The same text as transformers renders, except that a person's text never becomes a control token."""

import json
from pathlib import Path
from typing import Any

import pytest

from localchat.errors import BadCheckpoint, UserError
from localchat.template import ChatTemplate
from localchat.tokenizer import Segment, Tokenizer

DATA = Path(__file__).parents[1] / "data"
SMOLLM2 = (DATA / "smollm2_chat_template.jinja").read_text()
QWEN3_5 = (DATA / "qwen3.5_chat_template.jinja").read_text()
# What Qwen3's own template does with past thoughts: those before the last question of a person are left out.
THINKING = """{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Block trimming, loop controls, macros, the generation tag, the tokens of tokenizer_config, `tools` being defined.
ODDS_AND_ENDS = """{% macro turn(role, text='') %}[{{ role }}: {{ caller() if caller else text }}]{% endmacro %}
{{ bos_token }}{{ pad_token is defined }}{{ tools is none }}
    {% for m in messages %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
    {% if m.role == 'assistant' %}
        {% set x %}{{ m.content | upper | trim }}{% endset %}
        {% generation %}{{ x }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ turn(m['role'], m.content | replace('i', '!')) }}
        {% call turn('again') %}{{ "%s-%d" | format(m.role, loop.index0 * 2 + 1) }}{% endcall %}
    {% endif %}
{{ loop.index }} {{ ['a', 1, none, {'k': (1, 2)}] | tojson }} {{ {'b': "<&>'é"} | tojson(indent=2) }}
{% endfor %}
{{ messages | map(attribute='role') | select('equalto', 'user') | join(', ') }}
"""

SYSTEM = {"role": "system", "content": " Be kind. \n"}
USER = {"role": "user", "content": "Hi\n\n  'there' < & 日本 {{ x }} {% y %} "}
ANSWER = {"role": "assistant", "content": "Hello\n", "reasoning_content": "\nhm, a greeting\n"}
PLAIN_ANSWER = {"role": "assistant", "content": "  1\n\n2"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [{"x": "é<"}]}}}],
}
RESULT = {"role": "tool", "content": "42"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER],
    [SYSTEM, USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    [USER, CALL, RESULT, ANSWER, USER],
    [USER, CALL, RESULT, RESULT],
    [SYSTEM, USER, ANSWER, USER, PLAIN_ANSWER, USER, ANSWER],
    [USER, ANSWER, USER, CALL, RESULT, ANSWER],
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"d": "<é>"}}}]},
]


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def rendered(source: str, content: str = "hello") -> str:
    return text_of(ChatTemplate(source, ()).render([{"role": "user", "content": content}]))


def refusal(source: str) -> str:
    """The sentence with which rendering ends."""
    with pytest.raises(UserError) as caught:
        rendered(source)
    assert not isinstance(caught.value, BadCheckpoint)
    return str(caught.value)


@pytest.mark.parametrize("name", ["SmolLM2", "thinking", "odds and ends", "Qwen3.5"])
def test_renders_what_transformers_renders(name: str, tiny_backend: Any) -> None:
    import transformers

    sources = {"SmolLM2": SMOLLM2, "thinking": THINKING, "odds and ends": ODDS_AND_ENDS, "Qwen3.5": QWEN3_5}
    source = sources[name]
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_backend, chat_template=source, **tokens)
    template = ChatTemplate(source, Tokenizer(tiny_backend).added_tokens, tokens)
    texts = set()
    for messages in CONVERSATIONS:
        for variables in VARIABLES:
            options = {"add_generation_prompt": True, **variables}
            want = reference.apply_chat_template(messages, tokenize=False, **options)
            assert template.render(messages, **options) == [Segment(want)]
            texts.add(want)
    assert len(texts) >= len(CONVERSATIONS)


def test_where_qwen3_5_puts_thoughts() -> None:
    """Generation begins inside of one; those of answered questions are left out."""
    template = ChatTemplate(QWEN3_5, ())
    opened = text_of(template.render([USER]))
    assert opened.endswith("<|im_start|>assistant\n<think>\n")
    closed = text_of(template.render([USER], enable_thinking=False))
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    answered = text_of(template.render([USER, ANSWER, USER]))
    assert "<|im_start|>assistant\nHello<|im_end|>" in answered
    assert "a greeting" not in answered
    assert answered.startswith(opened.removesuffix("<think>\n"))  # up to the answer's header, and no further
    assert "<think>\nhm, a greeting\n</think>\n\nHello" in text_of(template.render([USER, ANSWER]))
    with pytest.raises(UserError, match="No user query"):
        template.render([SYSTEM])


def test_the_ids_are_those_of_transformers(tiny_backend: Any) -> None:
    import transformers

    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_backend, chat_template=SMOLLM2)
    tokenizer = Tokenizer(tiny_backend)
    template = ChatTemplate(SMOLLM2, tokenizer.added_tokens)
    for messages in CONVERSATIONS:
        want = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(template.render(messages)) == want


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_typed_control_tokens_become_segments_of_their_own(role: str, tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(SMOLLM2, tiny_tokenizer.added_tokens)
    segments = template.render([SYSTEM, {"role": role, "content": "a<|im_end|>b <think><think>"}])
    assert segments[1:-1] == [
        Segment("<|im_end|>", special=False),
        Segment("b ", special=True),
        Segment("<think>", special=False),
        Segment("<think>", special=False),
    ]
    assert segments[0].text.endswith(f"<|im_start|>{role}\na")
    assert segments[-1].text == "<|im_end|>\n<|im_start|>assistant\n"
    ids, added = tiny_tokenizer.encode(segments), tiny_tokenizer.added_tokens
    assert [i for i in ids if i in added.values()] == [1, 2, 1, 2, 1]


def test_a_token_inside_of_another(tiny_tokenizer: Tokenizer) -> None:
    """What stands around a masked token cannot grow together to one."""
    template = ChatTemplate("{{ messages[0].content }}", tiny_tokenizer.added_tokens)
    text = "<|im_<|im_end|>end|>"
    segments = template.render([{"role": "user", "content": text}])
    assert segments == [Segment("<|im_"), Segment("<|im_end|>", special=False), Segment("end|>")]


def test_a_thought_is_masked_too(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(THINKING, tiny_tokenizer.added_tokens)
    segments = template.render([USER, {"role": "assistant", "content": "x", "reasoning_content": "</think>"}])
    assert [s.text for s in segments if not s.special] == ["</think>"]


def test_a_mask_that_the_message_contains_is_not_used(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}\U000f0001", tiny_tokenizer.added_tokens)
    segments = template.render([{"role": "user", "content": "\U000f0000<|im_end|>"}])
    assert segments == [Segment("\U000f0000"), Segment("<|im_end|>", special=False), Segment("\U000f0001")]


def test_white_space_tokens_are_ordinary_text(tiny_tokenizer: Tokenizer) -> None:
    assert "  " in tiny_tokenizer.added_tokens
    template = ChatTemplate("{{ messages[0].content }}", tiny_tokenizer.added_tokens)
    assert template.render([{"role": "user", "content": "a  b"}]) == [Segment("a  b")]


def test_messages_are_left_as_they_are(tiny_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "<think>"}]
    ChatTemplate(SMOLLM2, tiny_tokenizer.added_tokens).render(messages)
    assert messages == [{"role": "user", "content": "<think>"}]


def test_where_the_template_is_found(tiny_folder: Path) -> None:
    def answer() -> str:
        return text_of(ChatTemplate.load(tiny_folder, Tokenizer.load(tiny_folder)).render([USER]))

    config = tiny_folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "text {{ bos_token }}", "bos_token": {"content": "<b>"}}))
    assert answer() == "text <b>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list{{ eos_token }}"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": "<e>"}))
    assert answer() == "list<e>"
    (tiny_folder / "chat_template.jinja").write_text("file")
    assert answer() == "file"


def test_loading_masks_the_folders_own_tokens(tiny_folder: Path) -> None:
    (tiny_folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    segments = ChatTemplate.load(tiny_folder, Tokenizer.load(tiny_folder)).render(
        [{"role": "user", "content": "<think>"}]
    )
    assert segments == [Segment("<think>", special=False)]


@pytest.mark.parametrize("content", [None, "{}", '{"chat_template": ""}', '{"chat_template": [{"name": "rag"}]}'])
def test_no_chat_template(content: str | None, tiny_folder: Path) -> None:
    if content is not None:
        (tiny_folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match="no chat template"):
        ChatTemplate.load(tiny_folder, Tokenizer.load(tiny_folder))


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a' | nosuch }}", "{% for i in x %}" * 30 + "{% endfor %}" * 30, "{{" + "(" * 5000]
)
def test_a_template_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be compiled"):
        ChatTemplate(source, ())


def test_an_oversized_template() -> None:
    with pytest.raises(BadCheckpoint, match=r"1,000,001 characters"):
        ChatTemplate("x" * 1_000_001, ())


def test_the_template_refuses_a_conversation() -> None:
    assert refusal("{{ raise_exception('roles must alternate') }}").endswith("conversation: roles must alternate")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ x.y.z }}",
        "{{ messages[0]['content']['k'].v }}",
        "{{ 'a' + 1 }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails(source: str) -> None:
    assert "fails with this conversation" in refusal(source)
