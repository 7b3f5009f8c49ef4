"""`/model`: another model under the same conversation, which it reads anew. One model is in memory at a time.

`/set kv_cache` is the same with the same model: keys and values of another form are computed, not converted.
"""

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localchat import parameters
from localchat.chat import Chat
from localchat.prepare import packed_folder

if TYPE_CHECKING:
    from localchat.session import Opened


class ModelSwitch:
    """Changes the model of `chat`, which was opened from `folder` with `run`'s arguments."""

    def __init__(self, chat: Chat, folder: Path, args: argparse.Namespace) -> None:
        self._chat, self._folder, self._args = chat, folder, args

    def __call__(self, name: str) -> "Opened":
        """Load the model called `name` in place of the present one, which comes back if that fails.

        Raises:
            UserError: there is no such model, or it cannot be had, be loaded, or does not fit.
        """
        folder = packed_folder(name, offline=self._args.offline, yes=self._args.yes)
        return self._change(folder, argparse.Namespace(**{**vars(self._args), "model": name}))

    def keep_as(self, kv_cache: str) -> "Opened":
        """Keep keys and values in this form from now on; if that fails all stays as it is.

        Raises:
            UserError: the context that was asked for does not fit so.
        """
        origins = {**self._args.origins, "kv_cache": parameters.SET}
        changes = {"kv_cache": kv_cache, "origins": origins}
        return self._change(self._folder, argparse.Namespace(**{**vars(self._args), **changes}))

    def _change(self, folder: Path, args: argparse.Namespace) -> "Opened":
        from localchat.session import open_chat

        self._release()
        try:
            opened = open_chat(folder, args)
        except BaseException:
            self._take(open_chat(self._folder, self._args))
            raise
        self._folder, self._args = folder, args
        self._take(opened)
        return opened

    def _take(self, opened: "Opened") -> None:
        self._chat.change_model(opened.chat.engine, opened.chat.tokenizer, opened.chat.template)

    def _release(self) -> None:
        """Give the memory back before the next model asks for it."""
        import torch

        nothing: Any = None
        self._chat.engine = nothing
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
