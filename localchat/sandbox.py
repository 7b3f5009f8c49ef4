"""Running a chat template that came with a model: jinja2's immutable sandbox, with bounds on time and memory.

A template is a program by a stranger. jinja2's sandbox keeps it away from Python's internals, but loops in loops,
`'a' * 10**9` or a list that doubles forty times would still stop the machine. So every value that a template makes is
measured: one value is at most MAX_VALUE, all of them together at most a budget that grows with the conversation, and
the clock is looked at with each value and in each turn of a loop.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Sizes are in characters; an item of a list, or a turn of a loop, counts as much as ITEM of them.
ITEM = 32
MAX_VALUE = 8_000_000
MAX_PRODUCT = 8 * MAX_VALUE
MAX_INTEGER_BITS = 4096
BUDGET = 32_000_000
BUDGET_PER_INPUT = 64
SECONDS = 5.0

# What makes a result as large as the product of its arguments' sizes; a number's size is then its value.
_MULTIPLYING = frozenset(
    {"*", "%", "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust"}
    | {"round", "slice", "tojson", "translate", "zfill"}
)
_LAZY_FILTERS = frozenset({"map", "select", "reject", "selectattr", "rejectattr"})
# No prompt needs these; each can take quadratic time, or does not give the same text twice.
_REMOVED_FILTERS = ("pprint", "random", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
# Widths of five digits and more, widths taken from an argument, replacement fields in replacement fields.
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*?(\*|\d{5})|\{[^{}]*(\{|\d{5})")


class LimitExceeded(SecurityError):
    """A template went over a bound."""


class Refused(TemplateError):
    """A template called raise_exception: it does not take this conversation."""


class Meter:
    """What one rendering may still use. `given` is the conversation, whose size raises the budget."""

    def __init__(self, given: Any = (), seconds: float = SECONDS) -> None:
        self._known: dict[int, int] = {}
        self._left = BUDGET + BUDGET_PER_INPUT * self._measure_given(given)
        self._end = time.monotonic() + seconds

    def spend(self, amount: int) -> None:
        """Count `amount` characters, items or steps.

        Raises:
            LimitExceeded: the budget or the time is used up.
        """
        self._left -= amount
        if self._left < 0 or time.monotonic() > self._end:
            raise LimitExceeded("it takes too long or makes too much text")

    def size(self, value: Any) -> int:
        """Characters of a string, ITEM and more for each item of a container and all it contains, 1 for anything else.

        Raises:
            LimitExceeded: it is more than MAX_VALUE, or a number with more than MAX_INTEGER_BITS.
        """
        total, stack = 1, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise LimitExceeded("it computes with a number that is too large")
            elif id(item) in self._known:
                total += self._known[id(item)]
            else:
                items = _items(item)
                total += ITEM * len(items)
                stack += items
            if total > MAX_VALUE:
                raise LimitExceeded("it makes a text or list that is too large")
        return total

    def check(self, value: Any) -> Any:
        """`value`, measured and counted.

        Raises:
            LimitExceeded: it is too large, or the budget or the time is used up.
        """
        self.spend(self.size(value))
        return value

    def check_product(self, operation: str, values: list[Any]) -> None:
        """To be called before an operation that could multiply sizes.

        Raises:
            LimitExceeded: the result could be larger than MAX_PRODUCT.
        """
        product = 1
        for value in values:
            size = self.size(value)
            if operation in _MULTIPLYING:
                product *= max(1, abs(value)) if isinstance(value, int) else size
        if product > MAX_PRODUCT:
            raise LimitExceeded("it makes a text or list that is too large")

    def _measure_given(self, value: Any) -> int:
        """Measure the conversation's containers once: a template asks for their size again and again."""
        if isinstance(value, str):
            return len(value) + 1
        total = 1 + sum(ITEM + self._measure_given(item) for item in _items(value))
        if isinstance(value, dict | list | tuple):
            self._known[id(value)] = total
        return total


def _items(value: Any) -> Collection[Any]:
    """What a container contains, nothing for anything else; the commonest kinds are asked for first."""
    if isinstance(value, list | tuple):
        return value
    if value is None or isinstance(value, int | float):
        return ()
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # its text shows them, so they count
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, KeysView | ValuesView | ItemsView | set | frozenset):
        return list(value)
    return ()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for (transformers defines it), with a Meter.

    It serves one rendering at a time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are folded where nothing measures them
            finalize=self.made,
            extensions=[_Generation, loopcontrols],
        )
        self.meter = Meter()
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> Template:
        """Raises TemplateSyntaxError, and whatever Python's compiler raises for code that nests too deep."""
        self.meter = Meter(source)
        return self.from_string(source)

    def render_bounded(self, template: Template, variables: Mapping[str, Any], seconds: float = SECONDS) -> str:
        """The rendered text. Raises TemplateError (LimitExceeded, Refused ...) and what Python's operations raise."""
        self.meter = Meter(variables, seconds)
        pieces = [self.meter.check(piece) for piece in template.generate(variables)]
        text = "".join(pieces)
        self.meter.check(text)
        return text

    def step(self, amount: int) -> bool:
        """Called by the compiled template in each turn of a loop, with the size of the constant text in it."""
        self.meter.spend(amount)
        return True

    def made(self, value: Any) -> Any:
        """Called by the compiled template with each list, dict, tuple and `~` text it makes, and with each output."""
        return self.meter.check(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template. (The names are jinja2's: keyword arguments must not collide with them.)"""
        if __obj in (__self.step, __self.made):
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            _refuse_wide_format(method.__name__, owner)
            __self.meter.check_product(method.__name__, [owner, *args, *kwargs.values()])
        return __self.meter.check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every + * ** % in a template."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and numbers and abs(left) > 1 and abs(right) > MAX_INTEGER_BITS:
            raise LimitExceeded("it computes with a number that is too large")
        if not numbers:
            _refuse_wide_format(operator, left)
            self.meter.check_product(operator, [left, right])
        return self.meter.check(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `function` with its arguments and its result measured."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context comes before the value

        @functools.wraps(function)  # with jinja2's marks, such as pass_context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            head, (value, *rest) = args[:first], args[first:]
            if name in _LAZY_FILTERS:
                value = (item for item in value if self.step(ITEM))
            elif isinstance(value, Iterator):
                value = [self.meter.check(item) for item in value]
            rest = [list(a) if isinstance(a, Iterator) else a for a in rest]
            _refuse_wide_format(name, value)
            self.meter.check_product(name, [value, *rest, *kwargs.values()])
            return self.meter.check(function(*head, value, *rest, **kwargs))

        return bounded


class _Instrument(NodeTransformer):
    """Puts calls of `step` and `made` into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """A loop: one step for each turn, also for those that its `if` skips."""
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        text += sum(len(str(const.value)) for const in node.find_all(nodes.Const))
        step = _call("step", nodes.Const(ITEM + text))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("step", nodes.Const(ITEM)), node.test, lineno=node.lineno)
        return node

    def visit_made(self, node: nodes.Expr) -> nodes.Expr:
        """A value that is made by syntax instead of a call."""
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _call("made", node)

    visit_Concat = visit_List = visit_Dict = visit_Tuple = visit_made


def _call(name: str, argument: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's type

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse_wide_format(operation: str, text: Any) -> None:
    if operation in ("%", "format", "format_map") and isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise LimitExceeded("it formats to a width that is too large")


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without jinja2's escapes for HTML, which would corrupt tool schemas."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
