"""Ranks must multiply alike: what each one's device and start-up checks made of the precision is compared.

Every rank decides for itself which backend multiplies what (`quant.backends.choose`), from its own device. One rank on
which a check fails would emulate what the others multiply natively: slower, so that all wait for it, and with other
sums. Nothing of the run would say so, since rank 0 alone prints. So a difference is an error at the start.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.errors import ConfigError
from lowbit.trainer.distributed import Ranks

Reports = Sequence[Mapping[str, Any]]


def require_alike(ranks: Ranks, reports: Reports) -> None:
    """Called by all ranks, each with its own `RunPrecision.reports()`.

    Raises: ConfigError, on every rank: one of them multiplies something otherwise than rank 0, and why.
    """
    first, *others = ranks.gather(list(reports))
    for rank, theirs in enumerate(others, 1):
        difference = _difference(first, theirs, rank)
        if difference is not None:
            raise ConfigError(
                f"rank {rank} would compute otherwise than rank 0: {difference}; give all ranks the same devices and "
                "software, or set precision.backend=emulated, which is the same everywhere"
            )


def _difference(first: Reports, theirs: Reports, rank: int) -> str | None:
    """The first operand that two ranks compute differently, in words."""
    for ours, other in zip(first, theirs, strict=True):
        if ours["dtype"] != other["dtype"]:
            return f"{other['dtype']} and not {ours['dtype']} (precision.compute)"
        for here, there in zip(ours["rows"], other["rows"], strict=False):
            if here != there:
                why = "; ".join(dict.fromkeys(text for report in (other, ours) for _, text in report["remarks"]))
                what = f"{there['layers']}: {there['product']} {_how(there)}, and {_how(here)} on rank 0"
                return f"{what} ({why})" if why else what
        if len(ours["rows"]) != len(other["rows"]):
            return f"its layers are grouped otherwise ({ours['when']})"
    return None


def _how(row: Mapping[str, Any]) -> str:
    return f"{row['format']} {row['runs']}" + (
        f" by {row['backend']}" if row["backend"] not in ("", row["runs"]) else ""
    )
