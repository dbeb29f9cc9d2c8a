"""Master weights as their forward quantiser sees them, whole or in shards.

A stabiliser reads and changes FP32 masters in place. An engine that shards them (ZeRO) holds a piece of the flattened
weight; a piece can be quantised alone, with the bits that the whole would give, exactly when no block and no outer
scale reaches across its ends. Otherwise `rows_of` refuses, and says why.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from lowbit.errors import ConfigError
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.spec import Outer, QuantSpec


class Master(NamedTuple):
    """One layer's FP32 weight, or this process's piece of it."""

    name: str
    """The weight's full name."""
    tensor: Tensor
    """FP32, changed in place: the whole [out, in], or a shard [n] of it, flattened."""
    layer: LowbitLinear
    start: int = 0
    """Where the shard begins in the flattened weight. A process that holds nothing of it has an empty shard."""

    @property
    def layer_name(self) -> str:
        return self.name.removesuffix(".weight")


def whole_masters(model: nn.Module) -> Iterator[Master]:
    """Every low-bit layer's weight, for an engine that shards nothing."""
    for name, module in model.named_modules():
        if isinstance(module, LowbitLinear):
            yield Master(f"{name}.weight", module.weight.detach(), module)


def weight_spec(master: Master, policy: LinearPolicy | None = None) -> QuantSpec | None:
    """The quantiser of W in the forward product, of the layer's policy if none is given; None where it stays BF16.

    Raises ConfigError where a weight's quantised value is not a function of the weight alone.
    """
    product = (policy or master.layer.policy).fprop
    spec = product.right.spec
    if spec is not None and (spec.stochastic or product.rotation):
        why = f"{spec.name} is stochastic" if spec.stochastic else "the forward product is rotated"
        raise ConfigError(
            f"{master.layer_name}: {why}, so that its weight has no grid of its own to be put on: a forward that is "
            "neither (precision.forward=nvfp4) or precision.stabilisers.oscireset.enabled=false would work"
        )
    return spec


def weight_specs(master: Master) -> list[QuantSpec]:
    """`weight_spec` under every policy that the run may give the layer. Raises ConfigError, as that."""
    return [spec for policy in master.layer.phases if (spec := weight_spec(master, policy)) is not None]


def rows_of(master: Master, spec: QuantSpec) -> Tensor:
    """The master as a matrix [rows, columns] (a view) that `spec` quantises as it would quantise the whole weight.

    Raises ConfigError for a shard that a block or an outer scale reaches out of.
    """
    rows, columns = master.layer.out_features, master.layer.in_features
    size, start = master.tensor.numel(), master.start
    if size in (0, rows * columns):
        return master.tensor.view(-1, columns)
    problem = ""
    block_rows = spec.block[0]
    if spec.outer is Outer.TENSOR or spec.block == (0, 0):
        problem = "has one scale for the whole weight"
    elif start % columns == 0 and size % columns == 0:
        first, count = start // columns, size // columns
        if first % block_rows == 0 and (count % block_rows == 0 or first + count == rows):
            return master.tensor.view(count, columns)
        problem = f"has blocks of {block_rows} rows, and the shard is rows {first} to {first + count}"
    elif block_rows != 1 or spec.outer is Outer.ROW or spec.block[1] == 0:
        problem = "needs whole rows, and the shard begins or ends inside one"
    elif any(number % spec.column_multiple for number in (columns, start, size)):
        problem = f"needs shards of whole blocks of {spec.column_multiple}, and this one is {start} to {start + size}"
    else:
        multiple = math.gcd(columns, start, size)  # as long as the blocks fit, rows of the view may have any length
        return master.tensor.view(size // multiple, multiple)
    raise ConfigError(
        f"{master.name}: {spec.name} {problem}: it cannot be quantised shard by shard; engine.zero_stage=0, which "
        "shards nothing, would work"
    )


def quantised_rows(master: Master, spec: QuantSpec) -> Tensor:
    """What `spec` quantises of the master, [rows, columns]: a view, or a copy without OutControl's channels."""
    columns = _ordinary_columns(master)
    if columns is None:
        return rows_of(master, spec)
    return whole_rows(master, spec).index_select(1, columns)


def put_rows(master: Master, spec: QuantSpec, weight: Tensor) -> None:
    """Write back what `quantised_rows` gave, changed."""
    columns = _ordinary_columns(master)
    if columns is None:
        rows_of(master, spec).copy_(weight)
    else:
        whole_rows(master, spec).index_copy_(1, columns, weight)


def _ordinary_columns(master: Master) -> Tensor | None:
    """The columns that `spec` quantises, int64, where OutControl retains others."""
    retained, policy = master.layer.retained, master.layer.policy
    return None if retained is None or not retained.applies(policy) else retained.ordinary


def whole_rows(master: Master, spec: QuantSpec) -> Tensor:
    """`rows_of` with all columns of the layer in each row. Raises ConfigError for a shard that has not."""
    weight = rows_of(master, spec)
    if weight.shape[1] != master.layer.in_features:
        raise ConfigError(
            f"{master.name}: OutControl needs shards of whole rows, and this one begins or ends in one: "
            "engine.zero_stage=0, which shards nothing, would work"
        )
    return weight


def block_counts(rows: int, columns: int, spec: QuantSpec) -> tuple[int, int]:
    """Row blocks and column blocks of a matrix, padding included."""
    padded = -(-columns // spec.column_multiple) * spec.column_multiple
    return -(-rows // spec.block[0]), padded // spec.block[1]
