"""What low-bit layers keep for the backward pass, counted tensor by tensor, and the allocator's peak on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.quant.linear
from lowbit.configs.schema import ModelConfig
from lowbit.models.attention import prepare_mask
from lowbit.models.block import Block
from lowbit.models.layers import Linear
from lowbit.models.transformer import Transformer
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import Kept, LinearPolicy
from lowbit.quant.presets import PRESETS

CONFIG = ModelConfig(layers=1, width=256, heads=4, kv_heads=2, mlp_width=512, max_sequence=8192)
NVFP4 = ["nvfp4", "nvfp4_nvidia", "nvfp4_tetrajet", "nvfp4_quartet2"]


def block_of(policy: LinearPolicy | None, config: ModelConfig = CONFIG, device: str = "cpu") -> Block:
    """A block with random weights; None: plain linear layers."""
    model = Transformer(config, 64, torch.bfloat16)
    model.init_weights(0)
    model.to(device)
    block = model.blocks[0]
    assert isinstance(block, Block)
    if policy is not None:
        clock = make_clock().to(device)
        for name, module in list(block.named_modules()):
            if isinstance(module, Linear):
                parent, _, child = name.rpartition(".")
                low = LowbitLinear.of(module, policy, make_key(1, name).to(device), clock, name)
                setattr(block.get_submodule(parent), child, low)
    return block


class Saved:
    """Collects the bytes of what autograd saves inside, each storage once, parameters apart."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.ignored = {p.untyped_storage().data_ptr() for p in parameters}
        self.tensors: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in self.ignored:
            self.tensors[at] = tensor
        return tensor

    def __enter__(self) -> "Saved":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def arguments(block: Block, tokens: int, width: int, device: str = "cpu") -> tuple[Tensor, Any, Any]:
    """x, mask and rotary tables of two sequences."""
    x = torch.randn(2, tokens // 2, width, dtype=torch.bfloat16, device=device).requires_grad_()
    table = torch.ones(1, tokens // 2, 1, block.attention.head_dim, device=device)
    return x, prepare_mask(None, 2, tokens // 2, torch.device(device)), (table, table)


def watch(monkeypatch: pytest.MonkeyPatch, block: Block) -> tuple[Saved, list[Tensor]]:
    """What the linear layers save, and their inputs."""
    saved, inputs = Saved(list(block.parameters())), []
    real = lowbit.quant.linear.linear_products

    def watched(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        inputs.append(x)
        with saved:
            return real(x, *rest)

    monkeypatch.setattr(lowbit.quant.linear, "linear_products", watched)
    return saved, inputs


@pytest.mark.parametrize("name", NVFP4)
@pytest.mark.parametrize("width", [256, 192])
def test_a_block_keeps_a_third_of_its_inputs(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """q/k/v, out, gate/up and down; 192 is not a multiple of 128, where quantisers pad."""
    config = ModelConfig(layers=1, width=width, heads=4, kv_heads=2, mlp_width=512)
    block = block_of(PRESETS[name], config)
    saved, inputs = watch(monkeypatch, block)
    block(*arguments(block, 512, width)).x.sum().backward()
    assert [x.shape[1] for x in inputs] == [width, width, width, 512]
    assert len({x.untyped_storage().data_ptr() for x in inputs}) == 4
    assert saved.nbytes <= 0.33 * sum(2 * x.numel() for x in inputs)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_tensor", "fp8_row", "fp8_block"])
def test_eight_bit_formats_keep_little_more_than_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(PRESETS[name])
    saved, inputs = watch(monkeypatch, block)
    block(*arguments(block, 512, CONFIG.width)).x.sum().backward()
    assert saved.nbytes <= 0.53 * sum(2 * x.numel() for x in inputs)


def test_what_a_policy_says_is_kept_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in PRESETS.items():
        if not policy.quantised:
            continue
        block = block_of(policy)
        saved, inputs = watch(monkeypatch, block)
        block(*arguments(block, 512, CONFIG.width))
        numbers = sum(x.numel() for x in inputs)
        wanted = policy.kept_operand.bits * numbers / 8
        assert wanted <= saved.nbytes < 1.02 * wanted + 4 * 4 * 512, name  # scales of rows, keys and the clock beside
        if policy.kept is Kept.INPUT:
            assert all(x.untyped_storage().data_ptr() in saved.tensors for x in inputs), name
        monkeypatch.undo()


def test_nothing_is_kept_for_weights_that_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(PRESETS["nvfp4"]).requires_grad_(False)
    saved, _ = watch(monkeypatch, block)
    block(*arguments(block, 512, CONFIG.width)).x.sum().backward()
    assert saved.nbytes < 200  # keys and the clock


@pytest.mark.slow
def test_a_compiled_block_keeps_packed_codes_and_no_copy_of_a_weight() -> None:
    """The partitioner's choice, without Inductor's code: as eager, with the BF16 inputs and rounded weights gone."""
    kept = {}
    for policy in (None, PRESETS["nvfp4"]):
        torch.compiler.reset()
        block = block_of(policy)
        compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
        given = arguments(block, 512, CONFIG.width)
        with Saved(list(block.parameters())) as saved:
            compiled(*given)
        kept[policy] = saved
    low = kept[PRESETS["nvfp4"]]
    weights = {tuple(p.shape) for p in block.parameters() if p.ndim == 2}
    saved_shapes = [tuple(t.shape) for t in low.tensors.values() if t.dtype == torch.bfloat16]
    assert not {shape for shape in saved_shapes if shape in weights and 512 not in shape}
    inputs = 2 * 512 * (3 * CONFIG.width + CONFIG.mlp_width)
    # A plain block keeps the first input to recompute nothing, and attention's result for attention's own sake.
    own = 2 * 512 * CONFIG.width
    assert low.nbytes <= kept[None].nbytes - 0.67 * inputs + own


def peak(step: Callable[[], Tensor]) -> int:
    """Bytes that the allocator held at most beyond what there was before, over a forward and backward pass."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step().sum().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_peak_of_a_row_of_blocks_on_a_gpu(compiled: bool) -> None:
    """Half of what eight BF16 blocks keep as linear layers' inputs is gone from the peak, a quarter if compiled."""
    config = ModelConfig(layers=1, width=1024, heads=8, kv_heads=8, mlp_width=4096, max_sequence=4096)
    tokens, peaks = 8192, {}
    for policy in (None, PRESETS["nvfp4"]):
        torch.compiler.reset()
        blocks = [block_of(policy, config, "cuda") for _ in range(8)]
        if compiled:
            for block in blocks:
                block.compile(fullgraph=True, dynamic=False)
        x, mask, rope = arguments(blocks[0], tokens, config.width, "cuda")

        def step(blocks: list[Block] = blocks, x: Tensor = x, mask: Any = mask, rope: Any = rope) -> Tensor:
            for block in blocks:
                x = block(x, mask, rope).x
            return x

        peaks[policy] = peak(step)
        del blocks, x, step
    inputs = 8 * 2 * tokens * (3 * config.width + config.mlp_width)
    saved = peaks[None] - peaks[PRESETS["nvfp4"]]
    print(f"peak BF16 {peaks[None] / 2**20:.0f} MiB, NVFP4 {peaks[PRESETS['nvfp4']] / 2**20:.0f} MiB")
    # `down`'s input is silu(gate) * up, which nothing else keeps in eager mode; a compiler may recompute it anyway.
    assert saved > (0.25 if compiled else 0.5) * inputs
