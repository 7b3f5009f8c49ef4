"""A hostile template ends in one sentence, by counting instead of by waiting; an honest one is not bothered."""

from typing import Any

import pytest
from jinja2 import TemplateError

from localchat.errors import UserError
from localchat.sandbox import MAX_VALUE, BoundedEnvironment, LimitExceeded, Meter
from localchat.template import ChatTemplate

GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(200) %%}{%% set ns.x = %s %%}{%% endfor %%}"


def render(source: str, **variables: Any) -> str:
    environment = BoundedEnvironment()
    return environment.render_bounded(environment.compile_template(source), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**13 }}",
        "{{ [1] * 10**13 }}",
        "{{ 9 ** (9**9) }}",
        "{{ '%10000000000000d' % 1 }}",
        "{{ '%*d' % (10**13, 1) }}",
        "{{ '%(a)10000000000000d' % {'a': 1} }}",
        "{{ '%10000000000000d' | format(1) }}",
        "{{ '{:>10000000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**13) }}",
        "{{ '{a:>10000000000000}'.format_map({'a': 1}) }}",
        "{{ 'a'.center(10**13) }}",
        "{{ 'a'.ljust(10**13) }}",
        "{{ '1'.zfill(10**13) }}",
        "{{ ('\t' * 1000).expandtabs(10**9) }}",
        "{{ 'a' | center(10**13) }}",
        "{{ 'a\nb' | indent(10**13) }}",
        "{{ 2 | round(10**13, 'floor') }}",
        "{{ [1] | batch(10**13, 2) | list }}",
        "{{ [1] | slice(10**13) | list }}",
        "{{ [1] | tojson(indent=10**13) }}",
        "{% set b = 'a' * 10**6 %}{{ b | replace('a', b) }}",
        "{% set b = 'a' * 10**6 %}{{ b.replace('a', b) }}",
        "{% set b = 'a' * 10**6 %}{{ b.translate({97: b}) }}",
        "{% set b = 'a' * 10**6 %}{{ b.join(b) }}",
        "{% set b = 'a' * 10**6 %}{{ [b, b, b, b, b, b, b, b, b] | join }}",
        "{% set b = 'a' * 10**6 %}{{ ('%(a)s' * 10**4) % {'a': b} }}",
        "{% set b = 'a' * 10**6 %}{{ ('{0}' * 10**4).format(b) }}",
        "{% set b = 'a' * 10**6 %}{{ b.join(range(99999) | map('string')) }}",
        "{% set b = 'a' * 10**6 %}{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
        "{{ range(99999) | map('center', 10**5) | join }}",
        "{{ ''.join(range(99999) | map('center', 10**5)) }}",
        "{{ dict.fromkeys(range(99999), 'a' * 10**6) | string | length }}",
        GROWING % ("'aaaa'", "ns.x ~ ns.x"),
        GROWING % ("'aaaa'", "ns.x + ns.x"),
        GROWING % ("3", "ns.x * ns.x"),
        GROWING % ("[1]", "[ns.x, ns.x]"),
        GROWING % ("[1]", "(ns.x, ns.x)"),
        GROWING % ("[1]", "{1: ns.x, 2: ns.x}"),
        GROWING % ("[1]", "dict(a=ns.x, b=ns.x).values()"),
        GROWING % ("[1]", "[namespace(a=ns.x, b=ns.x)]"),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ [ns] }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | reject | list %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{% for i in range(99999) %}{{ '" + "x" * 1000 + "' }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}{% endmacro %}{{ m() | length }}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}{% endset %}",
        "{% set b = 'a' * 10**6 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    ],
)
def test_too_much_is_refused_before_it_is_made(source: str) -> None:
    """Without the bounds each of these takes gigabytes or hours; none depends on the clock."""
    environment = BoundedEnvironment()
    template = environment.compile_template(source)
    with pytest.raises(LimitExceeded):
        environment.render_bounded(template, {}, seconds=1e9)


def test_exponential_macros_meet_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that make next to nothing are ended by the clock, which a test can turn."""
    now = iter(range(10**9))
    monkeypatch.setattr("localchat.sandbox.time.monotonic", lambda: next(now) / 100)
    with pytest.raises(LimitExceeded):
        render("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}")
    assert next(now) < 1000


@pytest.mark.parametrize("slow", ["range(999) | select('eq', b) | list", "range(999) | map('string') | list"])
def test_the_clock_is_looked_at_for_each_item(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr("localchat.sandbox.time.monotonic", lambda: looks.append(1) or 0.0)
    render("{% set b = 'x' %}{% set r = " + slow + " %}")
    assert len(looks) > 999


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(10**9) }}",
        "{{ lipsum(n=1) }}",
        "{{ 'a.b' | urlize }}",
    ],
)
def test_out_of_bounds(source: str) -> None:
    with pytest.raises((TemplateError, OverflowError)):
        render(source, messages=[1])


def test_a_long_conversation_is_no_problem() -> None:
    """Budgets grow with the conversation: ten operations on each of many long messages."""
    source = (
        "{% for m in messages %}{% set c = m.content | trim %}{% if not c.startswith('<x>') and messages | length %}"
        "{{ '<s>' + m.role + '\n' + c + '<e>' + '\n' }}{{ c.split('</x>')[-1] | replace('b', 'cc') | length }}"
        "{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    text = render(source, messages=messages)
    assert text.startswith("<s>user\nword word") and len(text) > 2_000_000
    long = [{"role": "user", "content": "word " * 400_000}]
    assert len(render(source, messages=long)) > 1_999_990


def test_honest_arithmetic_and_formats() -> None:
    assert render("{{ 10**9 + 3 }} {{ 2**64 * 3 }} {{ '-' * 3 }}") == "1000000003 55340232221128654848 ---"
    assert render("{{ '%05d' % 42 }} {{ '{:>5}|{}'.format(1, 'x') }}") == "00042     1|x"
    assert render("{{ [3, 1] | sort | join(',') }}{{ 'a' | center(5) }}{{ 1.25 | round(1) }}") == "1,3  a  1.2"


def test_a_value_just_below_the_bound() -> None:
    assert len(render("{{ 'a' * n }}", n=MAX_VALUE - 10)) == MAX_VALUE - 10
    with pytest.raises(LimitExceeded):
        render("{{ 'a' * n }}", n=MAX_VALUE + 10)


def test_the_budget_is_per_rendering() -> None:
    environment = BoundedEnvironment()
    template = environment.compile_template("{% for i in range(9) %}{{ 'a' * 100000 }}{% endfor %}")
    for _ in range(30):
        assert len(environment.render_bounded(template, {})) == 900_000


def test_the_budget_grows_with_what_is_given() -> None:
    small, large = Meter(["a"]), Meter(["a" * 10**6])
    large.spend(50_000_000)
    with pytest.raises(LimitExceeded):
        small.spend(50_000_000)


def test_the_user_reads_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^the model's chat template was stopped: it makes a text or list .*\.$"):
        ChatTemplate("{{ 'a' * 10**9 }}", ()).render([])
