"""`localchat doctor --tune`: measure a card anew, show every candidate, and keep the best.

What a card in the table of kernels/cards.py gives is only shown: the table stays what counts there.
"""

import json
from dataclasses import asdict

import torch

from localchat import tuning
from localchat.device import choose_device
from localchat.errors import UserError
from localchat.kernels.cards import TABLE, card_of
from localchat.prepare import say
from localchat.stopwatch import Stopwatch


def run(*, as_json: bool) -> int:
    """Measure the first card.

    Raises:
        UserError: there is no card, it is too full, or nothing can be run on it.
    """
    device = torch.device(choose_device())
    if device.type != "cuda":
        raise UserError("--tune measures an NVIDIA card, and none is here.")
    identity = tuning.identity_of(device)
    try:
        found = tuning.measure(card_of(device), Stopwatch(device))
    except torch.OutOfMemoryError as error:
        raise UserError(f"{identity.name} is too full to measure anything.", "close what else uses it.") from error
    if found is None:
        raise UserError(f"no candidate runs on {identity.name}.", "`localchat doctor` looks for the reason.")
    return report(identity, found, as_json=as_json)


def report(identity: tuning.Identity, found: tuning.Measured, *, as_json: bool) -> int:
    """Print what was found, and keep it where the table does not know the card."""
    known = TABLE.get(identity.name)
    in_table = known is not None and known.multiprocessors == identity.multiprocessors
    if as_json:
        print(json.dumps({"identity": asdict(identity), **asdict(found), "in_table": in_table}, indent=2))
    else:
        for what, us in found.trials:
            print(f"{what:<60}{'does not run' if us is None else f'{us:9.1f} us'}")
        print(f"\n{table_line(identity, found)}")
    if in_table:
        say(f"nothing is kept: {identity.name} stands in the table of kernels/cards.py")
        return 0
    try:
        tuning.keep(identity, found)
    except OSError as error:
        raise UserError(f"{identity.path} cannot be written ({error.strerror}).", "set LOCALCHAT_CACHE.") from error
    say(f"kept in {identity.path}")
    return 0


def table_line(identity: tuning.Identity, found: tuning.Measured) -> str:
    """An entry for TABLE of kernels/cards.py."""
    settings = ", ".join(
        f"{name}={value}" if isinstance(value, int) else f"{name}=Fragments{tuple(value)}"
        for name, value in vars(found.settings).items()
    )
    origin = f'"measured {found.date} with localchat doctor --tune"'
    return f'"{identity.name}": Card({identity.multiprocessors}, Settings({settings}), {origin}),'
