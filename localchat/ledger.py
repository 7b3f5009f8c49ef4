"""The memory ledger: what a model takes, row by row, before anything is downloaded or loaded.

Computed from shapes alone (a registry entry or a config.json) for a given context, or from the tensors of a packed
folder. All numbers are bytes; GB in texts means 1e9 bytes. Nothing here imports torch.

    matrix [N, K], INT4, groups of G:  N*K/2 for the codes, N*K/G * 2 for fp16 scales, as much again for mins; N rounded
                                       up to 16
    matrix [N, K], INT8:               N*K for the codes, N * 4 for fp32 scales
    keys and values of one token:      2 * attention layers * num_key_value_heads * head_dim * 2 (bf16; fp32 on a CPU),
                                       or * (head_dim + 4) as INT8 with fp32 scales
    gated delta net state:             value heads * key dim * value dim * 4 (fp32) a layer, and the last three
                                       inputs of its convolution (as keys and values)

Qwen3.5's head for the token after the next (mtp.*) is in the files and not in memory, so it is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from localchat.config import GROUP_SIZES, TILE_ROWS, ModelConfig, TensorFormat, load_config
from localchat.errors import BadCheckpoint
from localchat.shard_files import shard_files
from localchat.stats import memory_used

KV_BYTES = {"cpu": 4, "cuda": 2}  # fp32 and bf16, see ops.py
SCALE_BYTES = 4  # of an INT8 key or value of one head
PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}  # tokens of one forward, as in the tables of ops (which import torch)
KV_SLAB = 32768  # keys of an INT8 cache that a card dequantises at once, at least (kernels/attention_slabs.py)
CUDA_CONTEXT = 800_000_000  # driver, torch, Triton and cuBLAS of one process; 0.79-0.81e9 measured on an H200
GRAPH_ROWS = 256  # of the largest graph of a few tokens (forward_graphs.py)
DEFAULT_CONTEXT = {"cpu": 8192, "cuda": 32768}  # tokens; a processor reads slowly, and its cache is fp32
SNAPSHOT_BUDGET = 4 << 30  # host memory for states to return to, of models that cannot be cut back

_WEIGHTS = ("INT4 weights", "scales", "INT8 weights", "unquantised weights", "embedding", "lm_head", "norms and biases")
_DTYPE_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "I64": 8, "F64": 8}


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


def ledger(config: ModelConfig, context: int | None = None, device: str = "cpu", *, int8_kv: bool = False) -> Ledger:
    """The ledger of a model that need not exist yet: by its formats, or by those that `quantize` would choose.

    context: tokens; None means the model's own maximum. device: "cpu" or "cuda". int8_kv: of keys and values as INT8.
    """
    sizes = dict.fromkeys(_WEIGHTS, 0)
    for name, n, k in _matrices(config):
        form = config.quantization.format_of(name) if config.quantization else _default_format(config, name, k)
        codes, scales = _matrix_bytes(n, k, form)
        scales *= 2 if form.bits == 4 and not config.quantization and _has_zero_points(config) else 1
        if name in ("embed_tokens", "lm_head"):
            sizes[name.replace("embed_tokens", "embedding")] += codes + scales
        else:
            sizes[{4: "INT4 weights", 8: "INT8 weights"}.get(form.bits, "unquantised weights")] += codes
            sizes["scales"] += scales
    sizes["norms and biases"] = _small_bytes(config)
    return _with_run_time(config, sizes, context, device, int8_kv)


def ledger_of_folder(folder: Path, context: int | None = None, device: str = "cpu", *, int8_kv: bool = False) -> Ledger:
    """The ledger of a packed folder, from the tensors that are really in its files.

    Raises:
        BadCheckpoint: config.json or a safetensors header cannot be read, or a file is missing.
    """
    sizes = dict.fromkeys(_WEIGHTS, 0)
    for path in shard_files(folder):
        for row, nbytes in _tensors(path):
            sizes[row] += nbytes
    return _with_run_time(load_config(folder), sizes, context, device, int8_kv)


def kv_bytes_per_token(config: ModelConfig, device: str = "cpu", *, int8_kv: bool = False) -> int:
    """Bytes that one more token takes in the KV cache of all attention layers."""
    layers = config.layer_types.count("full_attention")
    row = config.head_dim + SCALE_BYTES if int8_kv else config.head_dim * KV_BYTES[device]
    return 2 * layers * config.num_key_value_heads * row


def state_bytes(config: ModelConfig, device: str = "cpu") -> int:
    """Bytes of the recurrent state of one conversation, which is also the size of one snapshot; 0 without any."""
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    convolution = config.conv_channels * config.linear_conv_kernel_dim * KV_BYTES[device]
    return config.layer_types.count("linear_attention") * (state + convolution)


def default_snapshot_budget() -> int:
    """Bytes: SNAPSHOT_BUDGET, or an eighth of this machine's memory where that is less."""
    return min(SNAPSHOT_BUDGET, memory_used()[1] // 8)


def _with_run_time(
    config: ModelConfig, sizes: dict[str, int], context: int | None, device: str, int8_kv: bool
) -> Ledger:
    """Behind the weights' rows: what a conversation of `context` tokens needs beside them."""
    context = config.max_position_embeddings if context is None else context
    per_token, state = kv_bytes_per_token(config, device, int8_kv=int8_kv), state_bytes(config, device)
    rows = [Row(name, nbytes) for name, nbytes in sizes.items() if nbytes]
    rows.append(Row(f"KV cache, {context:,} tokens{', INT8' * int8_kv}", context * per_token))
    if state:
        most = default_snapshot_budget() // state
        rows.append(Row("recurrent state", state))
        rows.append(Row(f"snapshots, at most {most}", most * state, optional=True))
    rows.append(Row("workspace", _workspace_bytes(config, device, int8_kv=int8_kv)))
    if device == "cuda":
        in_int8 = config.quantization is None or config.quantization.format_of("embed_tokens").bits == 8
        embedding = {"embedding"} if in_int8 and not config.tie_word_embeddings else set()  # as Model.on_host
        rows = [replace(row, on_host=row.name in embedding or row.name.startswith("snapshots")) for row in rows]
        rows.append(Row("CUDA context", CUDA_CONTEXT))
    return Ledger(tuple(rows), sum(sizes.values()), context, config.max_position_embeddings, per_token)


def default_formats(config: ModelConfig) -> dict[str, TensorFormat]:
    """The format of every matrix as `quantize` would choose it; names are those of model.py."""
    return {name: _default_format(config, name, k) for name, _, k in _matrices(config)}


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Every matrix that is quantised, as (name, N, K); names are those of model.py."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield "embed_tokens", config.vocab_size, hidden
    if not config.tie_word_embeddings:
        yield "lm_head", config.vocab_size, hidden
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            yield f"layers.{i}.self_attn.qkv_proj", q * (1 + config.attn_output_gate) + 2 * kv, hidden
            yield f"layers.{i}.self_attn.o_proj", hidden, q
        else:
            values = config.linear_value_size
            yield f"layers.{i}.linear_attn.in_proj_qkvz", config.conv_channels + values, hidden
            yield f"layers.{i}.linear_attn.in_proj_ba", 2 * config.linear_num_value_heads, hidden
            yield f"layers.{i}.linear_attn.out_proj", hidden, values
        yield f"layers.{i}.mlp.gate_up_proj", 2 * inter, hidden
        yield f"layers.{i}.mlp.down_proj", hidden, inter


def _small_bytes(config: ModelConfig) -> int:
    """Norms and biases, bf16; in a hybrid norms (1 is added), A_log and dt_bias are fp32 and the convolutions bf16."""
    hidden, head_dim, linear = config.hidden_size, config.head_dim, config.layer_types.count("linear_attention")
    full = len(config.layer_types) - linear
    norms = hidden + len(config.layer_types) * 2 * hidden + full * 2 * head_dim * config.qk_norm
    biases = full * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim * config.qkv_bias
    if not linear:
        return 2 * (norms + biases)
    per_delta_net = 4 * (2 * config.linear_num_value_heads + config.linear_value_head_dim)
    return 4 * norms + linear * (per_delta_net + 2 * config.conv_channels * config.linear_conv_kernel_dim)


def _workspace_bytes(config: ModelConfig, device: str, *, int8_kv: bool) -> int:
    """Activations of one prefill chunk (residual, norm, the wider mixer, gate, up, product) and fp32 logits.

    fp32 on a CPU; bf16 on a card, which also dequantises one matrix at a time into bf16 scratch and takes gated delta
    nets in chunks (kernels/gated_delta_net_prefill.py). An INT8 cache it dequantises into the same scratch, a slab at a
    time, or beside it where that is too small (kernels/attention_slabs.py); what several slabs give is fp32, and there
    when gate, up and their product are not. As for the longest context, so that this does not depend on it. And the
    graphs of a few tokens have activations of their own, in fp32 (forward_graphs.py).
    """
    gates = config.num_attention_heads * config.attn_output_gate
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads + gates) * config.head_dim
    mixer = max(attention, config.conv_channels + 2 * config.linear_value_size)  # qkvz and its result, as qkv and heads
    features = 4 * config.hidden_size + 2 * mixer + 3 * config.intermediate_size
    logits = 3 * config.vocab_size * 4
    if device == "cpu":
        return PREFILL_CHUNK[device] * features * 4 + logits
    scratch = max(n * k for name, n, k in _matrices(config) if name not in ("embed_tokens", "lm_head"))
    graphs = GRAPH_ROWS * features * 4
    if int8_kv:
        elements, longest = 2 * config.num_key_value_heads * config.head_dim, config.max_position_embeddings
        slab = elements * min(longest, KV_SLAB)
        parts = -(-elements * longest // max(scratch, slab))
        given = 2 * parts * config.num_attention_heads * config.head_dim if parts > 1 else 0
        features += max(0, given - 3 * config.intermediate_size)
        scratch += slab if slab > scratch else 0
    chunked = 2 * config.conv_channels + 4 * config.linear_value_size + 256 * config.linear_num_value_heads
    return PREFILL_CHUNK[device] * (features * 2 + chunked) + graphs + logits + scratch * 2


def _matrix_bytes(n: int, k: int, form: TensorFormat) -> tuple[int, int]:
    """(codes, scales and mins) of a matrix [n, k]."""
    if form.bits == 4:
        rows = -(-n // TILE_ROWS) * TILE_ROWS
        return rows * k // 2, rows * (k // form.group_size) * 2 * (1 if form.symmetric else 2)
    return (n * k, n * 4) if form.bits == 8 else (n * k * 2, 0)


def _default_format(config: ModelConfig, name: str, k: int) -> TensorFormat:
    """What quantize/convert.py chooses by itself: groups of 32 with scale and min in small models, else 128.

    Of a 4-bit checkpoint that another tool has made, its own groups.
    """
    if name in ("embed_tokens", "lm_head") or name.endswith(".in_proj_ba") or k % 32:
        return TensorFormat(bits=8)
    foreign, small = config.foreign_quantization, config.hidden_size < 2048
    kept = foreign.kept_group_size if foreign else 0
    largest = kept or (32 if small else 128)
    symmetric = foreign.symmetric if foreign and kept else not small
    return TensorFormat(4, max(g for g in GROUP_SIZES if g <= largest and k % g == 0), symmetric)


def _has_zero_points(config: ModelConfig) -> bool:
    """Whether the scales and mins that keep another tool's levels are in fp32: a scale times a zero point."""
    foreign = config.foreign_quantization
    return foreign is not None and foreign.kept_group_size > 0 and not foreign.symmetric


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
                yield row_of(name, len(shape), part.get_dtype()), prod(shape) * _DTYPE_BYTES[part.get_dtype()]
    except (SafetensorError, OSError, KeyError) as error:
        raise BadCheckpoint(f"{path}: its header cannot be read ({error}).") from error


def row_of(name: str, dimensions: int, dtype: str) -> str:
    """The row that counts a tensor of a packed model; dtype as in safetensors' headers."""
    if name.startswith(("embed_tokens.", "lm_head.")):
        return "lm_head" if name.startswith("lm_head.") else "embedding"
    if name.endswith((".scales", ".mins")):
        return "scales"
    if name.endswith(".qweight"):
        return "INT4 weights"
    if dimensions < 2 or name.endswith(".conv1d.weight"):
        return "norms and biases"
    return "INT8 weights" if dtype == "I8" else "unquantised weights"
