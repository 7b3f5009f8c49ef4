"""What `list`, `show` and `bench` print: a table for people, one JSON document with --json. Needs no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localchat import registry, store
from localchat.config import ModelConfig, QuantizationConfig, load_config
from localchat.counted import counted
from localchat.errors import DoesNotFit, ModelNotFound
from localchat.fitting import Fit, fit, fixes_for
from localchat.ledger import DEFAULT_CONTEXT, Ledger, ledger, ledger_of_folder
from localchat.memory_table import Memory, memory_of, table_text
from localchat.prepare import registry_name, size_text
from localchat.text_safety import one_line

if TYPE_CHECKING:
    from localchat.bench import BenchResult
    from localchat.bench_grid import Grid, GridRow


def print_models(*, as_json: bool, with_usage: bool) -> int:
    """Everything that can be run: what is on the disk first, then what would be downloaded."""
    stored = store.listing()
    names = {model.name for model in stored}
    rows = [
        {"name": m.name, "size": m.nbytes, "quantization": describe_quantization(m.quantization), "path": str(m.path)}
        for m in stored
    ]
    others = [e for e in registry.MODELS.values() if e.alias not in names]
    rows += [{"name": e.alias, "size": ledger(e.config).weights, "quantization": "", "path": ""} for e in others]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(one_line(str(row["name"]))) for row in rows)
    for row in rows:
        here = one_line(str(row["quantization"])) + ", on this machine" if row["path"] else "not downloaded"
        print(f"{one_line(str(row['name'])):<{width}}  {size_text(int(str(row['size']))):>8}  {here}")
    if with_usage:
        print("\nChat with one: localchat run NAME. `localchat --help` lists the commands.")
    return 0


def print_model(
    name: str,
    *,
    context: int | None,
    as_json: bool,
    kv_cache: str | None = None,
    gpu: str = "auto",
    vram: float | None = None,
    vram_asked: bool = True,
) -> int:
    """The shape of a model, its quantisation and its memory ledger on what `run` would use; what helps if it is little.

    Raises:
        ModelNotFound: it is neither here nor in the registry.
        UserError: there is no such card, it cannot be used, or a file of the model is missing or damaged.
        UsageError: the model was not made for so long a context.
    """
    folder, config, entry = _lookup(name)
    shape = config or (entry.config if entry else None)
    if shape is None:
        near = registry.suggest(name)
        hint = f"did you mean {near}?" if near else "`localchat list` names the models; a hub id is org/name."
        if "/" in name and not near:
            hint = f"`localchat pull {one_line(name)}` downloads a model first."
        raise ModelNotFound(f"{one_line(name)} is neither on this machine nor a name that is known.", hint)
    packed = folder is not None and config is not None and config.quantization is not None
    memory = memory_of(gpu, vram, vram_asked=vram_asked)

    def ledger_with(int8_kv: bool, tokens: int = 1, kind: str = memory.kind) -> Ledger:
        if packed and folder:
            return ledger_of_folder(folder, tokens, kind, int8_kv=int8_kv)
        return ledger(shape, tokens, kind, int8_kv=int8_kv)

    def on_cpu(int8_kv: bool) -> Ledger:
        return ledger_with(int8_kv, kind="cpu")

    fixes: list[str] = []
    try:  # as `run` chooses it
        chosen = fit(ledger_with, memory, context, kv_cache, on_cpu=on_cpu)
    except DoesNotFit:
        fixes = fixes_for(ledger_with, memory, context, kv_cache, on_cpu=on_cpu)
        usual = min(shape.max_position_embeddings, DEFAULT_CONTEXT[memory.kind])
        chosen = Fit(context or usual, int8_kv=kv_cache != "bf16")
    table = ledger_with(chosen.int8_kv, chosen.context)
    facts = _facts(name, folder, shape, entry)
    if as_json:
        found = {**_memory_facts(table, memory), "kv_cache": chosen.form(memory.kind), "fixes": fixes}
        print(json.dumps({**facts, "memory": found}, indent=2))
        return 0
    for key, value in facts.items():
        if value not in ("", None):
            print(f"{key.replace('_', ' '):<26}{one_line(f'{value:,}' if type(value) is int else str(value))}")
    print(f"\n{table_text(table, memory)}")
    if chosen.notice:
        print(f"\n{chosen.notice}")
    if fixes:
        print("\n" + "\n".join(["it does not fit; what helps:", *(f"  {fix}" for fix in fixes)]))
    return 0


def _memory_facts(table: Ledger, memory: Memory) -> dict[str, Any]:
    return {
        "rows": [
            {"name": row.name, "bytes": row.nbytes, "on_host": row.on_host, "in_total": row.in_total}
            for row in table.rows
        ],
        "total": table.total,
        "context": table.context,
        "device": memory.kind,
        "device_name": memory.name,
        "device_bytes": memory.total,
        "other_programs": memory.others,
        "available": memory.available,
        "largest_context": table.largest_context(memory.available),
    }


def print_bench(name: str, result: "BenchResult", *, as_json: bool) -> int:
    """The figures of one measurement."""
    if as_json:
        print(json.dumps({**result.to_dict(), "model": registry_name(name)}, indent=2))
        return 0
    limits = [
        (f"of {what}", f"{result.bandwidth / rate:.0%} of {rate / 1e9:,.0f} GB/s")
        for what, rate in (("the data sheet", result.sheet_bandwidth), ("a read kernel", result.read_bandwidth))
        if rate
    ]
    decoded = f"{result.decode_rate:.1f} tok/s over {counted(result.decode_tokens, 'token')}"
    if result.decode_tokens < 2:  # the first one's time is prefill's
        decoded = "not measured: more than one token (-n) is needed"
    rows = [
        ("model", result.model if result.synthetic else registry_name(name)),
        ("device", f"{result.device}, {result.threads} threads" if result.device == "cpu" else result.device),
        ("load", f"{result.load_seconds:.2f} s"),
        ("prefill", f"{result.prefill_rate:.1f} tok/s over {counted(result.prompt_tokens, 'token')}"),
        ("decode", decoded),
        *([("keys and values", "INT8")] if result.int8_kv else []),
        ("weights read per token", size_text(result.bytes_per_token)),
        ("bandwidth while decoding", f"{result.bandwidth / 1e9:.1f} GB/s"),
        *limits,
        ("memory of this process" if result.device == "cpu" else "peak memory", size_text(result.memory_bytes)),
    ]
    if result.card_bytes and result.ledger_bytes:
        taken, said = size_text(result.card_bytes), size_text(result.ledger_bytes)
        rows.append(("taken of the card", f"{taken}, its driver's part included; the ledger says {said}"))
    for key, value in rows:
        print(f"{key:<26}{value}")
    return 0


def print_bench_grid(name: str, grid: "Grid", *, as_json: bool) -> int:
    """A line for each row of a grid, what they have in common above them."""
    if as_json:
        print(json.dumps({**grid.to_dict(), "model": registry_name(name)}, indent=2))
        return 0
    facts = [
        ("model", grid.model if grid.synthetic else registry_name(name)),
        ("device", f"{grid.device}, {grid.threads} threads" if grid.device == "cpu" else grid.device),
        ("context", f"{grid.context:,} tokens; what is deep was made, not read"),
        *([("keys and values", "INT8")] if grid.int8_kv else []),
        ("weights read per token", size_text(grid.bytes_per_token)),
    ]
    if grid.read_bandwidth:
        facts.append(("a read kernel", f"{grid.read_bandwidth / 1e9:,.0f} GB/s"))
    if grid.card_bytes and grid.ledger_bytes:
        taken, said = size_text(grid.card_bytes), size_text(grid.ledger_bytes)
        facts.append(("taken of the card", f"{taken}, its driver's part included; the ledger says {said}"))
    for key, value in facts:
        print(f"{key:<26}{value}")
    on_card = grid.device != "cpu"
    titles = ["", "depth", "tok/s", "ms", "GB/s", "of sheet", "of read", "TFLOP/s", "extra memory"]
    lines = [titles, *(_grid_cells(grid, row) for row in grid.rows)]
    shown = [i for i in range(len(titles)) if on_card or titles[i] not in ("of sheet", "of read", "extra memory")]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    print()
    for line in lines:
        cells = [f"{line[i]:<{widths[i]}}" if i == 0 else f"{line[i]:>{widths[i]}}" for i in shown]
        print("  ".join(cells).rstrip())
    return 0


def _grid_cells(grid: "Grid", row: "GridRow") -> list[str]:
    """Of a decode row the milliseconds are those of a token."""
    decoding = row.kind == "decode"
    bandwidth = row.bytes * row.rate
    limits = [f"{bandwidth / limit:.0%}" if limit else "" for limit in (grid.sheet_bandwidth, grid.read_bandwidth)]
    milliseconds = row.seconds * 1e3 / (row.tokens if decoding else 1)
    return [
        f"{row.kind} {row.tokens:,}",
        f"{row.depth:,}",
        f"{row.rate:,.1f}" if row.rate < 1000 else f"{row.rate:,.0f}",
        f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}",
        *(
            [f"{bandwidth / 1e9:,.0f}", *limits, ""]
            if decoding
            else ["", "", "", f"{row.flops / row.seconds / 1e12:.1f}"]
        ),
        "" if row.extra_bytes is None else size_text(row.extra_bytes),
    ]


def _lookup(name: str) -> tuple[Path | None, ModelConfig | None, registry.Entry | None]:
    """Where a model is (None: not here), its config, and its registry entry."""
    path = store.as_path(name)
    entry = registry.lookup(name) if path is None else None
    folder = path if path and path.is_dir() else store.find(name)
    if folder is not None:
        return folder, load_config(folder), entry
    return path, _gguf_config(path) if path else None, entry


def _gguf_config(path: Path) -> ModelConfig:
    from localchat.quantize.convert import open_source

    with open_source(path) as source:
        return source.model_config


def _facts(name: str, folder: Path | None, config: ModelConfig, entry: registry.Entry | None) -> dict[str, Any]:
    quantization = config.quantization
    keys = (
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size max_position_embeddings tie_word_embeddings"
    )
    return {
        "name": registry_name(name),
        "hub_id": entry.hub_id if entry else "",
        "path": str(folder or ""),
        "quantization": describe_config(config) if quantization or config.foreign_quantization else "",
        "source": str(quantization.source.get("id", "")) if quantization else "",
        **{key: getattr(config, key) for key in keys.split()},
        "notice": entry.notice if entry else "",
    }


def describe_config(config: ModelConfig) -> str:
    """The quantisation of a model in a few words."""
    if config.quantization:
        return describe_quantization(config.quantization)
    return config.foreign_quantization.describe() if config.foreign_quantization else "not quantised"


def describe_quantization(quantization: QuantizationConfig) -> str:
    """As in "INT4 groups of 32, scale + min"."""
    form = quantization.default
    if form.bits != 4:
        return f"INT{form.bits}" if form.bits == 8 else "unquantised"
    return f"INT4 groups of {form.group_size}, {'symmetric' if form.symmetric else 'scale + min'}"
