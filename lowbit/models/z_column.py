"""The added column through which an attention kernel's backward pass takes a gradient of its logsumexp.

With P the weights, z_i the logsumexp of query i and g_i = dL/dz_i, Attention Z-Reg (models/attention_z.py) needs

    dS = P * (dO V^T - D + g)   with   D_i = sum_d dO_id O_id

Kernels know no g, but do know V, O and dO: one more column, 1 in V, 0 in O and g in dO, adds g_i * 1 to (dO V^T)_ij and
nothing to D_i. So the forward pass runs as always and only the backward call sees the wider tensors, eight columns
wider for the kernels' alignment.
"""

from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import Z_COLUMNS


def widened(
    grad_out: Tensor, grad_z: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dO, q, k, v and O [..., D] as the backward call takes them, [..., D + Z_COLUMNS]; grad_z is [...] like dO."""
    return _wider(grad_out, grad_z), _wider(q), _wider(k), _wider(v, 1.0), _wider(out)


def _wider(x: Tensor, column: Tensor | float | None = None) -> Tensor:
    width = x.shape[-1]
    x = F.pad(x, (0, Z_COLUMNS))
    if column is not None:
        x[..., width] = column
    return x
