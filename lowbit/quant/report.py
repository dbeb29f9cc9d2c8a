"""What each layer really got, as a table that a person can read and as plain values.

One row an operand: two for each of the three products. Layers with the same policy are one group, whose names are
written as a pattern that a shell would expand: blocks.{0..3}.{attention.{q,k,v,out},mlp.{gate,up,down}}.

*native* means that the device multiplies the format itself, through the backend in brackets. *emulated* means that the
numbers are those of the format and the product is an ordinary one of the type that the report names: right in every bit
of the operands, and no measure of the format's speed. Where hardware was passed over, a line says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowbit.quant.policy import EMULATED as EMULATION
from lowbit.quant.policy import Alignment, LinearPolicy, Operand, ProductPolicy

SIDES = {"fprop": ("X", "W"), "dgrad": ("dY", "W^T"), "wgrad": ("dY^T", "X^T")}
"""Left and right factor of each product."""
NATIVE, EMULATED = "native", "emulated"


@dataclass(frozen=True)
class Row:
    """One operand of one product of one group of layers."""

    layers: str
    count: int
    """Layers in the group."""
    product: str
    operand: str
    """X, W, dY, W^T, dY^T or X^T."""
    format: str
    bits: float
    """Bits an element."""
    runs: str
    """native or emulated."""
    note: str
    """Rotation, alignment, mean split."""
    backend: str = ""
    """What multiplies a quantised product."""

    @property
    def how(self) -> str:
        """`runs`, with the backend of what is native."""
        return f"{self.runs} ({self.backend})" if self.backend and self.runs == NATIVE else self.runs


@dataclass(frozen=True)
class PolicyReport:
    """What `apply_policy` did."""

    rows: tuple[Row, ...]
    kept: tuple[tuple[str, str, float], ...]
    """Of each group: its layers, what they keep of their input for the backward pass, and its bits an element."""
    dtype: str
    """What everything else computes in, and emulated products too: bf16 or fp32."""
    device: str
    remarks: tuple[tuple[str, str], ...] = ()
    """Of groups: their layers, and why something is emulated or stays in BF16."""

    @property
    def quantised(self) -> bool:
        """Whether any operand is."""
        return any(row.format not in ("BF16", "FP32") for row in self.rows)

    @property
    def runs(self) -> str:
        """`native`, `emulated`, or `native and emulated`: of the quantised products, or of all if none is."""
        found = {row.runs for row in self.rows if row.format not in ("BF16", "FP32")} or {r.runs for r in self.rows}
        return " and ".join(sorted(found, reverse=True))

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON)."""
        rows = [asdict(row) for row in self.rows]
        return {"dtype": self.dtype, "device": self.device, "rows": rows, "remarks": [list(r) for r in self.remarks]}

    def table(self) -> str:
        """The table, lines joined."""
        lines: list[str] = []
        for group, input_kept, bits in self.kept:
            rows = [row for row in self.rows if row.layers == group]
            lines.append(f"{group} ({rows[0].count} layers)")
            cells = [(r.product, r.operand, r.format, f"{r.bits:g}", r.how, r.note) for r in rows]
            if all(row.format == rows[0].format in ("BF16", "FP32") for row in rows):
                lines.append(f"  {rows[0].format} in all three products, {rows[0].runs}")
                lines += [f"  {text}" for layers, text in self.remarks if layers == group]
                continue
            lines += _columns([("product", "operand", "format", "bits", "runs", ""), *cells])
            lines.append(f"  kept for the backward pass: {input_kept}, {bits:g} bits an element")
            lines += [f"  {text}" for layers, text in self.remarks if layers == group]
        high = self.dtype.upper()
        lines.append(f"embeddings, norms, attention, LM head: {high}; emulated products multiply in {high}")
        if not self.quantised:
            lines[-1] = lines[-1].partition(";")[0]
        return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells as aligned lines, indented."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def report(
    policies: Mapping[str, LinearPolicy],
    dtype: str,
    device: str,
    plain: str = NATIVE,
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> PolicyReport:
    """The report of layers by full name.

    Args:
        policies: with the backends that multiply.
        dtype: what unquantised products compute in, bf16 or fp32. device: its name.
        plain: whether `dtype` itself is native or emulated.
        remarks: of layers by full name.
    """
    groups: dict[tuple[LinearPolicy, tuple[str, ...]], list[str]] = {}
    for name, policy in policies.items():
        groups.setdefault((policy, tuple((remarks or {}).get(name, ()))), []).append(name)
    rows: list[Row] = []
    kept: list[tuple[str, str, float]] = []
    said: list[tuple[str, str]] = []
    for (policy, texts), names in groups.items():
        pattern = collapse(names)
        said += [(pattern, text) for text in texts]
        for product in SIDES:
            rows += _rows(pattern, len(names), product, policy, dtype, plain)
        stored = policy.kept_operand
        kept.append((pattern, f"{policy.kept.value} in {_format(stored, dtype)}", _bits(stored, dtype)))
    return PolicyReport(tuple(rows), tuple(kept), dtype, device, tuple(said))


def _rows(layers: str, count: int, name: str, policy: LinearPolicy, dtype: str, plain: str) -> list[Row]:
    product: ProductPolicy = getattr(policy, name)
    backend = product.backend if product.quantised else ""
    runs = (EMULATED if backend == EMULATION else NATIVE) if backend else plain
    rotation = f"rotation {product.rotation}, {product.signs.value} signs" if product.rotation else ""
    rows = []
    for side, operand in zip(SIDES[name], (product.left, product.right), strict=True):
        notes = [rotation]
        if name == "fprop" and side == "X" and policy.mean_split:
            notes.append("less its mean over tokens")
        source = {"W^T": policy.fprop.right, "X^T": policy.fprop.left}.get(side)
        if source is not None and source.spec is not None:
            what = "dequantised" if policy.alignment is Alignment.ALIGNED else "original"
            notes.append(f"of the {what} {side.removesuffix('^T')}")
        note = ", ".join(filter(None, notes))
        format, bits = _format(operand, dtype), _bits(operand, dtype)
        rows.append(Row(layers, count, name, side, format, bits, runs, note, backend))
    return rows


def _format(operand: Operand, dtype: str) -> str:
    return dtype.upper() if operand.spec is None else operand.name


def _bits(operand: Operand, dtype: str) -> float:
    return {"bf16": 16.0, "fp32": 32.0}[dtype] if operand.spec is None else operand.bits


# Names --------------------------------------------------------------------------------------------------------


def collapse(names: Iterable[str]) -> str:
    """Dotted names as one pattern with braces: equal tails share their heads, runs of numbers become ranges."""
    return _braces([tuple(name.split(".")) for name in names])


def _braces(paths: Sequence[tuple[str, ...]]) -> str:
    tails: dict[str, list[tuple[str, ...]]] = {}
    for head, *tail in paths:
        tails.setdefault(head, [])
        if tail:
            tails[head].append(tuple(tail))
    heads_of: dict[str, list[str]] = {}
    for head, tail_paths in tails.items():
        heads_of.setdefault(_braces(tail_paths) if tail_paths else "", []).append(head)
    parts = [f"{_alternatives(heads)}.{tail}" if tail else _alternatives(heads) for tail, heads in heads_of.items()]
    return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"


def _alternatives(heads: Sequence[str]) -> str:
    """`q`, `{q,k,v}`, `{0..11}`, `{{0..3},7}`."""
    if len(heads) == 1:
        return heads[0]
    if not all(head.isdigit() for head in heads):
        return "{" + ",".join(heads) + "}"
    runs: list[list[int]] = []
    for number in sorted(int(head) for head in heads):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{{{run[0]}..{run[-1]}}}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return texts[0] if len(runs) == 1 and len(runs[0]) > 2 else "{" + ",".join(texts) + "}"
