"""What a report says of kinds of matrices, and what asks for one in vain."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from localchat import prepare
from localchat.errors import UsageError
from localchat.quality import errors_by_kind


def test_errors_by_kind() -> None:
    errors = {"layers.0.mlp.down_proj": 0.1, "layers.10.mlp.down_proj": 0.3, "lm_head": 0.01}
    found = errors_by_kind(errors)
    assert found["mlp.down_proj"] == (pytest.approx(0.2), 0.3, "layers.10.mlp.down_proj")
    assert found["lm_head"] == (0.01, 0.01, "lm_head")


def arguments(source: Path, **given: Any) -> argparse.Namespace:
    plain: dict[str, Any] = dict.fromkeys(("output", "group_size", "max_shard_size", "calib", "report"))
    plain |= dict.fromkeys(("overwrite", "offline", "yes", "json", "sym", "min", "uniform"), False)
    plain |= dict.fromkeys(("resume", "stream", "dry_run", "fp16_scales"), False)
    return argparse.Namespace(**{**plain, "source": str(source), "keep": [], "method": "rtn", **given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"calib": "x"}, "--calib is for --method gptq"),
        ({"json": True}, "--json is how a"),
        ({"report": "", "dry_run": True}, "with its source: --dry-run leaves nothing"),
        ({"report": "", "stream": True}, "with its source: --stream leaves nothing"),
        ({"method": "gptq", "stream": True}, "--stream never has all of it"),
    ],
)
def test_flags_that_do_nothing_are_refused(tmp_path: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        prepare.quantize(arguments(tmp_path, **given))
