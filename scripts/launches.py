"""What a decode step, or a forward of a few tokens, launches, recorded without a card.

The model runs on tensors that have shapes and no memory.

Triton's own launch is replaced by one that takes notes, so what is found is what the code does, in its order. Needs a
process without TRITON_INTERPRET, in which `triton.jit` gives kernels that can be compiled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localchat.cache import KVCache
from localchat.config import ModelConfig, QuantizationConfig, TensorFormat
from localchat.cuda_ops import CudaOps
from localchat.kernels.advance import advance
from localchat.kernels.cards import Card, use
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.kernels.sampling import mark_seen, sample, sampling_scratch
from localchat.ledger import default_formats
from localchat.model import Linear, Model
from localchat.registry import Entry

META = torch.device("meta")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its programs, its arguments by name, and the matrix that it reads, if it is a product."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]
    matrix: str = ""
    rows: int = 0
    columns: int = 0
    weight_bytes: int = 0  # codes alone
    nbytes: int = 0  # with scales, minima and bias

    @property
    def name(self) -> str:
        """The kernel's function."""
        return str(self.kernel.__name__)


def model_on_meta(entry: Entry) -> Model:
    """A model of these shapes, in the formats that `quantize` chooses by itself."""
    formats = default_formats(entry.config)
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 128), formats)
    config = ModelConfig.from_dict(entry.config_dict() | {"quantization_config": quantization.to_dict()})
    with META:
        model = Model(config, CudaOps(META))
        model.inv_freq = torch.empty_like(model.inv_freq)
    return model.eval()


def step_launches(entry: Entry, card: Card, context: int) -> tuple[Model, KVCache, list[Launch]]:
    """A token behind `context` others, as localchat/graph.py captures it."""
    launches: list[Launch] = []
    with _model_there(entry, card, context + 1) as (model, cache), _recorded(model, launches):
        vocab = model.config.vocab_size
        token, position, place, drawn = (torch.zeros(1, dtype=torch.int64, device=META) for _ in range(4))
        seen = torch.zeros(vocab, dtype=torch.uint8, device=META)
        settings = torch.zeros(8, device=META), torch.zeros(4, dtype=torch.int64, device=META)
        scratch = sampling_scratch(vocab, META)
        mark_seen(token, seen)
        logits = model.logits(model(token, position, cache))
        sample(logits, seen, *settings, place, drawn, scratch)
        advance(drawn, token, position, place)
    return model, cache, launches


def forward_launches(entry: Entry, card: Card, context: int, tokens: int) -> tuple[list[Launch], set[str]]:
    """A forward of `tokens` behind `context` others with the logits of each; and which operations of torch run."""
    launches: list[Launch] = []
    ids, positions = (torch.zeros(tokens, dtype=torch.int64, device=META) for _ in range(2))
    with _model_there(entry, card, context + tokens) as (model, cache), _recorded(model, launches), _Named() as named:
        model.logits(model(ids, positions, cache))
    return launches, named.names


class _Named(TorchDispatchMode):
    """Takes down what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _model_there(entry: Entry, card: Card, length: int) -> Iterator[tuple[Model, KVCache]]:
    """A model on META as if on `card`, and a cache of that length."""
    use(META, card)
    properties = SimpleNamespace(multi_processor_count=card.multiprocessors)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _device: properties), torch.inference_mode():
        model = model_on_meta(entry)
        yield model, KVCache(model.config, length, dtype=model.ops.cache_dtype, device=META)


@contextmanager
def _recorded(model: Model, launches: list[Launch]) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    owners = {
        id(tensor): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.bits != 16
        for tensor in (module.qweight if module.bits == 4 else module.weight,)
    }

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in options.items() if name in kernel.arg_names}
        size = grid(arguments) if callable(grid) else grid
        programs = 1
        for extent in size:
            programs *= extent
        chosen = {name: options[name] for name in _OPTIONS if name in options}
        launch = Launch(kernel, programs, arguments, chosen)
        owner = next((owners[id(value)] for value in arguments.values() if id(value) in owners), None)
        if owner and "embedding" not in launch.name:
            launch = _of_matrix(launch, *owner)
        launches.append(launch)

    with mock.patch.object(JITFunction, "run", note):
        yield


def _of_matrix(launch: Launch, name: str, linear: Linear) -> Launch:
    codes = linear.qweight if linear.bits == 4 else linear.weight
    return Launch(
        launch.kernel,
        launch.programs,
        launch.arguments,
        launch.options,
        matrix=name.rsplit(".", 1)[-1],
        rows=linear.rows,
        columns=linear.columns,
        weight_bytes=codes.nbytes,
        nbytes=sum(tensor.nbytes for tensor in linear.buffers()),
    )


def compiled(launch: Launch, arch: int) -> bytes:
    """The launch's kernel for compute capability `arch` (89 for 8.9), as machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # What a launch reads off its tensors, which are on no card here.
    on_card = {"PDL": arch >= 90, "USE_PTX": True}
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        value = on_card.get(parameter.name, value)
        signature[parameter.name] = "constexpr"
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            constants[(at,)] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    return bytes(built.asm["cubin"])


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i1" if isinstance(value, bool) else "i32"
