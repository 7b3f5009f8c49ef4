"""The memory ledger: what a model takes, row by row, before anything is downloaded or loaded.

Computed from shapes alone (a registry entry or a config.json) for a given context, or from the tensors of a packed
folder. All numbers are bytes; GB in texts means 1e9 bytes. Nothing here imports torch.

    matrix [N, K], INT4, groups of G:  N*K/2 for the codes (N rounded up to 16), N*K/G * 2 for fp16 scales, as much
                                       again for mins
    matrix [N, K], INT8:               N*K for the codes, N * 4 for fp32 scales
    keys and values of one token:      2 * attention layers * num_key_value_heads * head_dim * 2 (bf16; fp32 on a CPU)
    gated delta net state:             value heads * key dim * value dim * 4 (fp32) a layer, and the last three
                                       inputs of its convolution (as keys and values)

Qwen3.5's head for the token after the next (mtp.*) is in the files and not in memory, so it is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

from localchat.config import GROUP_SIZES, TILE_ROWS, QuantizationConfig, TensorFormat, load_config
from localchat.errors import BadCheckpoint

KV_BYTES = {"cpu": 4, "cuda": 2}  # fp32 and bf16, see ops.py
PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}  # tokens of one forward, as in the tables of ops (which import torch)
CUDA_CONTEXT = 800_000_000  # driver, torch, Triton and cuBLAS of one process; 0.79-0.81e9 measured on an H200
SNAPSHOT_BUDGET = 4 << 30  # host memory for states to return to, of models that cannot be cut back

_DTYPE_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "I64": 8, "F64": 8}


class Shape(Protocol):
    """What the ledger reads of a model: both `ModelConfig` and a registry `Entry` have it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def layer_types(self) -> tuple[str, ...]: ...
    @property
    def attn_output_gate(self) -> bool: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_value_size(self) -> int: ...
    @property
    def conv_channels(self) -> int: ...


@dataclass(frozen=True)
class Row:
    """One line: what it is and its bytes.

    Not part of the total: `on_host`, memory beside the card's, and `optional`, what is taken where there is room.
    """

    name: str
    nbytes: int
    on_host: bool = False
    optional: bool = False

    @property
    def in_total(self) -> bool:
        """Whether the model cannot run without it."""
        return not self.on_host and not self.optional


@dataclass(frozen=True)
class Ledger:
    """The rows at one context length (tokens), and what one more token costs. `weights`: the packed files' bytes."""

    rows: tuple[Row, ...]
    weights: int
    context: int
    max_context: int
    kv_bytes_per_token: int

    @property
    def total(self) -> int:
        """Bytes on the device that computes."""
        return sum(row.nbytes for row in self.rows if row.in_total)

    def largest_context(self, available: int) -> int:
        """The longest context (tokens) that fits into `available` bytes, at most what the model was trained for.

        0 where not even the weights fit.
        """
        room = available - (self.total - self.context * self.kv_bytes_per_token)
        if not self.kv_bytes_per_token:
            return self.max_context if room >= 0 else 0
        return max(0, min(self.max_context, room // self.kv_bytes_per_token))


def ledger(
    shape: Shape, context: int | None = None, quantization: QuantizationConfig | None = None, device: str = "cpu"
) -> Ledger:
    """The ledger of a model that need not exist yet: by its formats, or by those that `quantize` would choose.

    context: tokens; None means the model's own maximum. device: "cpu" or "cuda".
    """
    sizes = {"INT4 weights": 0, "scales": 0, "INT8 weights": 0, "unquantised weights": 0, "embedding": 0, "lm_head": 0}
    for name, n, k in _matrices(shape):
        form = quantization.format_of(name) if quantization else _default_format(shape, name, k)
        codes, scales = _matrix_bytes(n, k, form)
        if name in ("embed_tokens", "lm_head"):
            sizes[name.replace("embed_tokens", "embedding")] += codes + scales
        else:
            sizes[{4: "INT4 weights", 8: "INT8 weights"}.get(form.bits, "unquantised weights")] += codes
            sizes["scales"] += scales
    sizes["norms and biases"] = _small_bytes(shape)
    return _with_run_time(shape, sizes, context, device, quantization)


def ledger_of_folder(folder: Path, context: int | None = None, device: str = "cpu") -> Ledger:
    """The ledger of a packed folder, from the tensors that are really in its files.

    Raises:
        BadCheckpoint: config.json or a safetensors header cannot be read.
    """
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for row, nbytes in _tensors(path):
            sizes[row] = sizes.get(row, 0) + nbytes
    config = load_config(folder)
    return _with_run_time(config, sizes, context, device, config.quantization)


def kv_bytes_per_token(shape: Shape, device: str = "cpu") -> int:
    """Bytes that one more token takes in the KV cache of all attention layers."""
    layers = shape.layer_types.count("full_attention")
    return 2 * layers * shape.num_key_value_heads * shape.head_dim * KV_BYTES[device]


def state_bytes(shape: Shape, device: str = "cpu") -> int:
    """Bytes of the recurrent state of one conversation, which is also the size of one snapshot; 0 without any."""
    state = shape.linear_num_value_heads * shape.linear_key_head_dim * shape.linear_value_head_dim * 4
    convolution = shape.conv_channels * (shape.linear_conv_kernel_dim - 1) * KV_BYTES[device]
    return shape.layer_types.count("linear_attention") * (state + convolution)


def _with_run_time(
    shape: Shape, sizes: dict[str, int], context: int | None, device: str, quantization: QuantizationConfig | None
) -> Ledger:
    """Behind the weights' rows: what a conversation of `context` tokens needs beside them."""
    context = shape.max_position_embeddings if context is None else context
    per_token, state = kv_bytes_per_token(shape, device), state_bytes(shape, device)
    rows = [Row(name, nbytes) for name, nbytes in sizes.items() if nbytes]
    rows.append(Row(f"KV cache, {context:,} tokens", context * per_token))
    if state:
        rows.append(Row("recurrent state", state))
        rows.append(
            Row(f"snapshots, at most {SNAPSHOT_BUDGET // state}", SNAPSHOT_BUDGET // state * state, optional=True)
        )
    rows.append(Row("workspace", _workspace_bytes(shape, device)))
    if device == "cuda":
        in_int8 = quantization is None or quantization.format_of("embed_tokens").bits == 8
        embedding = {"embedding"} if in_int8 and not shape.tie_word_embeddings else set()  # as Model.on_host
        rows = [replace(row, on_host=row.name in embedding or row.name.startswith("snapshots")) for row in rows]
        rows.append(Row("CUDA context", CUDA_CONTEXT))
    return Ledger(tuple(rows), sum(sizes.values()), context, shape.max_position_embeddings, per_token)


def default_formats(shape: Shape) -> dict[str, TensorFormat]:
    """The format of every matrix as `quantize` would choose it; names are those of model.py."""
    return {name: _default_format(shape, name, k) for name, _, k in _matrices(shape)}


def _matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Every matrix that is quantised, as (name, N, K); names are those of model.py."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    yield "embed_tokens", shape.vocab_size, hidden
    if not shape.tie_word_embeddings:
        yield "lm_head", shape.vocab_size, hidden
    for i, kind in enumerate(shape.layer_types):
        if kind == "full_attention":
            yield f"layers.{i}.self_attn.qkv_proj", q * (1 + shape.attn_output_gate) + 2 * kv, hidden
            yield f"layers.{i}.self_attn.o_proj", hidden, q
        else:
            values = shape.linear_value_size
            yield f"layers.{i}.linear_attn.in_proj_qkvz", shape.conv_channels + values, hidden
            yield f"layers.{i}.linear_attn.in_proj_ba", 2 * shape.linear_num_value_heads, hidden
            yield f"layers.{i}.linear_attn.out_proj", hidden, values
        yield f"layers.{i}.mlp.gate_up_proj", 2 * inter, hidden
        yield f"layers.{i}.mlp.down_proj", hidden, inter


def _small_bytes(shape: Shape) -> int:
    """Norms and biases, bf16; in a hybrid norms (1 is added), A_log and dt_bias are fp32 and the convolutions bf16."""
    hidden, head_dim, linear = shape.hidden_size, shape.head_dim, shape.layer_types.count("linear_attention")
    full = len(shape.layer_types) - linear
    norms = hidden + len(shape.layer_types) * 2 * hidden + full * 2 * head_dim * shape.qk_norm
    biases = full * (shape.num_attention_heads + 2 * shape.num_key_value_heads) * head_dim * shape.qkv_bias
    if not linear:
        return 2 * (norms + biases)
    per_delta_net = 4 * (2 * shape.linear_num_value_heads + shape.linear_value_head_dim)
    return 4 * norms + linear * (per_delta_net + 2 * shape.conv_channels * shape.linear_conv_kernel_dim)


def _workspace_bytes(shape: Shape, device: str) -> int:
    """Activations of one prefill chunk (residual, norm, the wider mixer, gate, up, product) and fp32 logits.

    fp32 on a CPU; bf16 on a card, which also dequantises one matrix at a time into bf16 scratch and takes gated delta
    nets in chunks (kernels/gated_delta_net_prefill.py).
    """
    gates = shape.num_attention_heads * shape.attn_output_gate
    attention = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads + gates) * shape.head_dim
    mixer = max(attention, shape.conv_channels + 2 * shape.linear_value_size)  # qkvz and its result, as qkv and heads
    features = 4 * shape.hidden_size + 2 * mixer + 3 * shape.intermediate_size
    logits = 3 * shape.vocab_size * 4
    if device == "cpu":
        return PREFILL_CHUNK[device] * features * 4 + logits
    scratch = max(n * k for name, n, k in _matrices(shape) if name not in ("embed_tokens", "lm_head"))
    chunked = 2 * shape.conv_channels + 4 * shape.linear_value_size + 256 * shape.linear_num_value_heads
    return PREFILL_CHUNK[device] * (features * 2 + chunked) + logits + scratch * 2


def _matrix_bytes(n: int, k: int, form: TensorFormat) -> tuple[int, int]:
    """(codes, scales and mins) of a matrix [n, k]."""
    if form.bits == 4:
        return -(-n // TILE_ROWS) * TILE_ROWS * k // 2, n * (k // form.group_size) * 2 * (1 if form.symmetric else 2)
    return (n * k, n * 4) if form.bits == 8 else (n * k * 2, 0)


def _default_format(shape: Shape, name: str, k: int) -> TensorFormat:
    """What quantize/convert.py chooses by itself: groups of 32 with scale and min in small models, else 128."""
    if name in ("embed_tokens", "lm_head") or name.endswith(".in_proj_ba") or k % 32:
        return TensorFormat(bits=8)
    small = shape.hidden_size < 2048
    group_size = 32 if small else max(g for g in GROUP_SIZES if k % g == 0)
    return TensorFormat(bits=4, group_size=group_size, symmetric=not small)


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """(row, bytes) of each tensor in one safetensors file that is loaded, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name.startswith("mtp."):
                    continue
                part = file.get_slice(name)
                shape = part.get_shape()
                yield _row_of(name, len(shape), part.get_dtype()), prod(shape) * _DTYPE_BYTES[part.get_dtype()]
    except (SafetensorError, OSError, KeyError) as error:
        raise BadCheckpoint(f"{path}: its header cannot be read ({error}).") from error


def _row_of(name: str, dimensions: int, dtype: str) -> str:
    if name.startswith(("embed_tokens.", "lm_head.")):
        return "lm_head" if name.startswith("lm_head.") else "embedding"
    if name.endswith((".scales", ".mins")):
        return "scales"
    if name.endswith(".qweight"):
        return "INT4 weights"
    if dimensions < 2 or name.endswith(".conv1d.weight"):
        return "norms and biases"
    return "INT8 weights" if dtype == "I8" else "unquantised weights"
