"""Mixture of experts: y = sum over a token's k experts of gate * expert(x), plus the shared experts' network.

An expert is a small feed-forward network of the model's kind. All experts' rows go through one grouped product per
matrix; a token's k results are weighed and added in FP32.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.configs.schema import MlpKind, ModelConfig
from lowbit.models.layers import GroupedLinear, Linear, project
from lowbit.models.router import Collect, Dispatch, Router
from lowbit.models.spread import Spread


class SquaredReLU(nn.Module):
    """relu(x)^2; a module, so that one which quantises can take its place."""

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return F.relu(x).square()


class Mlp(nn.Module):
    """Feed-forward network: SwiGLU or squared ReLU."""

    def __init__(self, kind: MlpKind, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden) if kind is MlpKind.swiglu else None
        self.up = Linear(width, hidden)
        self.square: nn.Module = SquaredReLU()
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        if self.gate is None:
            hidden = self.square(self.up(x))
        else:
            gate, up = project(x, self.gate, self.up)
            hidden = F.silu(gate) * up
        y: Tensor = self.down(hidden)
        return y


class Experts(nn.Module):
    """Feed-forward networks of one shape, one for each group of rows."""

    def __init__(self, kind: MlpKind, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = GroupedLinear(experts, width, hidden) if kind is MlpKind.swiglu else None
        self.up = GroupedLinear(experts, width, hidden)
        self.down = GroupedLinear(experts, hidden, width)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [rows, width], offsets int32 [experts] -> [rows, width]."""
        if self.gate is None:
            hidden = F.relu(self.up(x, offsets)).square()
        else:
            gate, up = self.gate.project_together(x, offsets, [self.up])
            hidden = F.silu(gate) * up
        y: Tensor = self.down(hidden, offsets)
        return y


class Moe(nn.Module):
    """Router, routed experts, shared experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.choices = moe.top_k
        self.spread: Spread | None = None
        """Expert parallelism: the way to the other ranks' experts, where there is one."""
        self.router = Router(moe, config.width)
        self.experts = Experts(config.mlp, moe.experts, config.width, moe.expert_width)
        self.shared = Mlp(config.mlp, config.width, moe.shared * moe.expert_width) if moe.shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> (y [B, T, width], the router's loss, its statistics); see `router.Routing`."""
        rows = x.flatten(0, -2)
        routing = self.router(rows)
        places = (routing.order, routing.place, self.choices)
        there: Tensor = Dispatch.apply(rows, *places)  # type: ignore[no-untyped-call]
        if self.spread is None:
            made = self.experts(there, routing.offsets)
        else:
            made = self.spread(there, routing.offsets, self.experts)
        back: Tensor = Collect.apply(made, *places)  # type: ignore[no-untyped-call]
        y = (back.float() * routing.weights[:, :, None]).sum(1)
        if self.shared is not None:
            y = y + self.shared(rows).float()
        return y.to(x.dtype).view(x.shape), routing.loss, routing.statistics
