"""The engine for several processes: ZeRO by DeepSpeed, with our loss scale, clipping, precision and checkpoints.

What DeepSpeed does: shards optimizer states (stage 1), gradients (2) and weights (3), reduces gradients while the
backward pass goes on, gathers weights. What it is not asked for:

- Parameters stay FP32 and are rounded where they are used, as in one process; its BF16 mode is off.
- The loss is a sum over tokens, divided by the valid tokens of the whole step. Gradients are summed over ranks; where
  DeepSpeed insists on the mean (stage 3), the loss is multiplied by the number of ranks.
- Gradients of all micro-batches of a step add up on the rank, in FP32, and travel once, during the last one's backward
  pass. That costs a whole FP32 gradient a rank in steps of several micro-batches, also at stages 2 and 3. They travel
  after it in the first step, which finds out what gets gradients at all, at stages 1 to 3 where codes remember
  (`Wire.remembers`), and at stage 0 without codes, where DeepSpeed reduces after it.
- The norm is that of all gradients, computed from the parts; nothing is applied before it is known to be finite.

Checkpoints are whole tensors by name (`trainer/shards.py`), so a run may go on with another stage, another number of
processes, or in one process.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.comm.deepspeed import load_deepspeed, weights_unread, zero_config
from lowbit.configs.schema import CommKind, RunConfig
from lowbit.data.batch import Batch
from lowbit.models.block import Block
from lowbit.models.transformer import AS_WRITTEN, Transformer
from lowbit.trainer.arrivals import Arrivals
from lowbit.trainer.client_optimizer import ClientOptimizer
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.engine import check_names, wants_compile
from lowbit.trainer.gathered import gathered, without_hooks
from lowbit.trainer.objective import Objective, ObjectiveOutput, run_objective
from lowbit.trainer.optim import GroupRow
from lowbit.trainer.own_experts import OwnExperts
from lowbit.trainer.shards import Shards, common_steps, partitioned_groups, partitioned_parameters, replicated
from lowbit.trainer.wire import Wire

MIB = 1 << 20


class _Loss(nn.Module):
    """The module that DeepSpeed wraps: from the micro-batch put into `work` to its scaled loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.work: Callable[[], ObjectiveOutput]
        self.output: ObjectiveOutput

    def forward(self, scale: float) -> Tensor:
        self.output = self.work()
        return self.output.loss_sum * scale


class DeepSpeedEngine:
    """One of several processes; see `trainer.engine.Engine` for the interface."""

    def __init__(self, model: Transformer, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        """`model` has its first weights already, the same on every rank."""
        gc.collect()  # an earlier engine's cycles: now, rather than in whichever thread it would happen
        deepspeed = ranks.together(lambda: load_deepspeed(device.type))  # machines may have different ones
        self.model = model
        self.device = device
        self.ranks = ranks
        self.rank, self.world = ranks.rank, ranks.world
        self.stage = config.engine.zero_stage
        self._own: OwnExperts | None = None
        if config.engine.expert_parallel and self.world > 1:
            self._own = OwnExperts(model, ranks, config.optim)
        apart = self._own.parameters if self._own is not None else {}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._parameters = {n: p for n, p in model.named_parameters() if n not in apart and n not in self._frozen}
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._wire = Wire(config.comm, self.stage, ranks, model.compute_dtype, config.seed)
        self._ragged = False
        self._holding = False
        self._loss = _Loss(model)
        self._prepare_blocks(deepspeed, config)
        self._ds: Any
        with self._own.hidden() if self._own is not None else nullcontext(), weights_unread():
            self._optimizer = ClientOptimizer(model, config.optim, sharded=self.stage > 0)
            self._ds, *_ = deepspeed.initialize(
                model=self._loss, optimizer=self._optimizer, config=self._settings(config), dist_init_required=False
            )
        self._zero: Any = self._ds.optimizer
        self.shards = self._lay_out()
        self._make_states()
        if self._own is not None:
            self._own.add_to(self.shards)
        self._arrivals: Arrivals | None = Arrivals(self._parameters, ranks)  # until the first step is judged
        if self.world > 1:
            self._wire.attach(self._ds, self.shards, self._parameters, device)
        if self.stage == 3:
            self._keep_whole(model.embedding.weight, model.head_weight)
        elif self._wire.bf16_weights:
            self.refresh()

    # Building -------------------------------------------------------------------------------------------------------

    def _settings(self, config: RunConfig) -> dict[str, Any]:
        sizes = [p.numel() for p in self._parameters.values()]
        bucket = min(sum(sizes), config.engine.bucket_mib * MIB // 4)
        vectors = [p.numel() for p in self._parameters.values() if p.ndim < 2]
        ours = config.comm.kind is not CommKind.none and self.world > 1
        return zero_config(self.stage, bucket, max(vectors, default=0), self.device.type == "cuda", ours)

    def _prepare_blocks(self, deepspeed: Any, config: RunConfig) -> None:
        """Recomputation and compilation. At stage 3 a block's weights come together, with no hooks inside its graph."""
        self.model.attention_kernel = config.engine.attention
        self.model.set_recompute(config.engine.recompute)
        compiled = wants_compile(config.engine.compile, self.device)
        if self.stage < 3:
            if compiled:
                self.model.compile_blocks()
            return
        deepspeed.utils.set_z3_leaf_modules(self.model, [Block])
        if compiled:
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, options=AS_WRITTEN)

    def _lay_out(self) -> Shards:
        if self.stage == 0:
            return replicated(self.model, self.rank, self.world)
        make = partitioned_parameters if self.stage == 3 else partitioned_groups
        shards = make(self._zero, self._names, self.rank, self.world)
        self._optimizer.lay_out(shards.gather_group, shards.scatter_group)
        return shards

    def _make_states(self) -> None:
        """The optimizer's states as they are before the first step."""
        if self.stage == 0:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    self._optimizer.make_state(group, parameter)
            return
        for layout, group in zip(self.shards.groups, self._settings_of_groups(), strict=True):
            self._optimizer.make_state(group, layout.flat)

    def _settings_of_groups(self) -> list[dict[str, Any]]:
        """For each flat group of the layout its entry in the optimizer."""
        groups = self._optimizer.param_groups
        if self.stage < 3:
            return groups
        return [groups[self._zero.sub_group_to_group_id[i]] for i in range(len(self.shards.groups))]

    def _keep_whole(self, *parameters: nn.Parameter) -> None:
        """Stage 3: gather these after every step and keep them; the head is used outside of any module's forward."""
        for parameter in dict.fromkeys(parameters):
            # Persistent ones, too, are let go after a module that an evaluation runs out of training's order: a tied
            # head would be gone behind the embedding
            parameter.is_external_param = True  # type: ignore[attr-defined]
            if not parameter.ds_persist:  # type: ignore[attr-defined]
                parameter.ds_persist = True  # type: ignore[attr-defined]
                self._zero.persistent_parameters.append(parameter)
        self.refresh()

    # A step ---------------------------------------------------------------------------------------------------------

    def micro_step(self, objective: Objective, batch: Batch, scale: float, last: bool = True) -> ObjectiveOutput:
        """See `Engine.micro_step`."""
        after = self._arrivals is not None or self._ragged or self._wire.remembers
        self._hold_reduction(not last or self.stage == 0 or after)
        if self._arrivals is not None:
            self._arrivals.micro_batches += 1
        elif last and self._wire.attachment is not None:
            self._wire.attachment.leave_early()
        self._loss.work = lambda: run_objective(objective, self.model, batch)
        loss = self._ds(scale * (self.world if self.stage == 3 else 1))
        self._ds.backward(loss, scale_wrt_gas=False)
        return self._loss.output

    def _hold_reduction(self, hold: bool) -> None:
        """Let gradients add up on this rank, or have the coming backward pass reduce what has added up.

        What DeepSpeed's `coalesce_grad_reduction` sets, without its reduction after the block: that of the last
        micro-batch happens during its backward pass.
        """
        self._holding = hold
        self._ds.inside_no_sync_ctxt = hold
        self._ds.set_gradient_accumulation_boundary(not hold)
        if self.stage > 0:
            self._zero._coalesce_grad_reduction = hold

    def _reduce_held(self) -> None:
        """Reduce gradients that the backward passes left on the rank."""
        if self._arrivals is not None:
            self._ragged, self._arrivals = self._arrivals.judge(), None
        if self._ragged:
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    shape = getattr(parameter, "ds_shape", parameter.shape)
                    parameter.grad = torch.zeros(shape, dtype=parameter.dtype, device=self.device)
        self._hold_reduction(False)
        if self.stage == 0 and self._wire.attachment is not None:
            self._wire.attachment.reduce_whole()
        elif self.stage == 0:
            self._ds.allreduce_gradients(self._bucket)
        elif self.stage == 3:
            self._ds._flush_coalesced_reduction_zero3(self._zero)
        else:
            self._ds._flush_coalesced_reduction_zero12(self._zero)

    def gradient_norm(self) -> Tensor:
        """See `Engine.gradient_norm`."""
        if self._holding:
            self._reduce_held()
        norm = nn.utils.get_total_norm(self._gradients())
        if self.stage == 0:
            return norm  # of whole gradients, the same on every rank
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def _gradients(self) -> list[Tensor]:
        """The gradients that this rank steps on."""
        return self._reduced() + (self._own.gradients() if self._own is not None else [])

    def _reduced(self) -> list[Tensor]:
        if self.stage == 0:
            return [p.grad for p in self._parameters.values() if p.grad is not None]
        if self.stage == 3:
            return [self._zero.grad_partitions_flat_buffer]
        return [piece for group in self._zero.averaged_gradients.values() for piece in group]

    def step(self, lr_scale: float, gradient_scale: float) -> None:
        """See `Engine.step`."""
        if gradient_scale != 1.0:
            torch._foreach_mul_(self._gradients(), gradient_scale)
        self._optimizer.set_lr_scale(lr_scale)
        if self._own is not None:
            self._own.step(lr_scale)
        self._ds.step()
        self._wire.count_step(self.shards, self._parameters)

    def traffic(self) -> dict[str, float]:
        """See `Engine.traffic`."""
        row = self._wire.traffic.take()
        if self._own is not None:
            row["comm/token_bytes"] = self._own.take_sent()
        return row

    @property
    def _bucket(self) -> int:
        return int(self._ds.zero_reduce_bucket_size())

    def first_bad_gradient(self) -> str | None:
        """See `Engine.first_bad_gradient`."""
        parts = self.gradient_parts()
        names = [name for name in self.shards.parts if name in parts]
        bad = [float(not bool(parts[name].isfinite().all())) for name in names]
        found = [name for name, count in zip(names, self.ranks.sum(bad), strict=True) if count]
        return found[-1] if found else None

    def gradient_parts(self) -> dict[str, Tensor]:
        """This rank's part of every reduced gradient, flat under ZeRO 1 to 3; between `gradient_norm` and `step`."""
        if self.stage == 0:
            return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        own = self._own.parameters if self._own is not None else {}
        flats = [
            torch.cat([piece.reshape(-1) for piece in self._zero.averaged_gradients[i]])
            for i in range(len(self.shards.groups) - len(own))
        ]
        found = {name: part.of(flats[part.group]) for name, part in self.shards.parts.items() if name not in own}
        zeros = {name: torch.zeros_like(p) for name, p in own.items() if p.grad is None}
        return found | {name: (zeros[name] if p.grad is None else p.grad).view(-1) for name, p in own.items()}

    # Weights and states ---------------------------------------------------------------------------------------------

    def groups(self) -> list[GroupRow]:
        """See `Engine.groups`."""
        return self._optimizer.groups() + (self._own.rows() if self._own is not None else [])

    def weights(self) -> dict[str, Tensor]:
        """See `Engine.weights`."""
        return self.shards.masters()

    def start_of(self, name: str) -> int:
        """See `Engine.start_of`."""
        return self.shards.parts[name].start

    @torch.no_grad()
    def refresh(self) -> None:
        """See `Engine.refresh`."""
        if self.stage in (1, 2):
            self._zero.update_lp_params()
        elif self.stage == 3:
            kept = self._zero.persistent_parameters
            self._zero._partition_all_parameters()
            for index in range(len(self.shards.groups)):  # its parameters' parts are copies of the masters
                self._zero._reassign_or_swap_out_partitioned_parameters(index)
            if kept:
                kept[0].all_gather(kept)

    def collect(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Engine.collect`."""
        if self.stage > 0:
            return self.shards.collect(parts)
        shapes = {name: p.shape for name, p in self._parameters.items()}
        return {name: tensor.view(shapes[name]) for name, tensor in parts.items()} if self.ranks.first else {}

    def distribute(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Engine.distribute`."""
        keys = self.ranks.share(sorted(whole))
        return {key: self.shards.parts[key].cut(t) for key, t in self.shards.distribute(whole, keys, self.device)}

    def model_tensors(self) -> dict[str, Tensor]:
        """See `Engine.model_tensors`."""
        return self.collect(self.weights()) | (self._frozen_weights() if self.ranks.first else {})

    def _frozen_weights(self) -> dict[str, Tensor]:
        """What does not train: no part of ZeRO's, whole on every rank."""
        return {name: p.detach() for name, p in self._frozen.items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """See `Engine.optimizer_tensors`."""
        slots = self._slots()
        whole = self._collect_slots({key: tensor for key, tensor in slots.items() if tensor.ndim})
        if self.ranks.first:
            whole |= {key: tensor.clone() for key, tensor in slots.items() if not tensor.ndim}
        return whole

    def exchange_tensors(self) -> dict[str, Tensor]:
        """See `Engine.exchange_tensors`."""
        return self._wire.state()

    def load_exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_exchange`."""
        self._wire.load(tensors)

    def _collect_slots(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.stage > 0:
            return self.shards.collect(parts)
        return parts if self.ranks.first else {}

    def _slots(self) -> dict[str, Tensor]:
        """This rank's part of every state, by `<name>.<slot>`, and the step counts, which belong to whole groups."""
        slots: dict[str, Tensor] = {}
        for name, part in self.shards.parts.items():
            if self._own is not None and name in self._own.parameters:
                slots |= {f"{name}.{slot}": t.view(-1) if t.ndim else t for slot, t in self._own.states(name).items()}
                continue
            flat = self._parameters[name] if self.stage == 0 else self.shards.groups[part.group].flat
            for slot, tensor in self._optimizer.state[flat].items():
                slots[f"{name}.{slot}"] = part.of(tensor) if tensor.ndim and self.stage > 0 else tensor
        return slots

    @torch.no_grad()
    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """See `Engine.load`."""
        slots = self._slots()
        shapes = {name: part.shape for name, part in self.shards.parts.items()}
        states = {k: t.shape if not t.ndim else shapes[k.rpartition(".")[0]] for k, t in slots.items()}
        frozen = self._frozen_weights()
        everything = shapes | {name: p.shape for name, p in frozen.items()}
        self.ranks.first_does(lambda: check_names("weights", everything, model))
        self.ranks.first_does(lambda: check_names("optimizer states", states, optimizer))
        for name, held in frozen.items():
            if self.ranks.first:
                held.copy_(model[name])
            dist.broadcast(held, src=0)
        masters = self.weights()
        for name, whole in self.shards.distribute(model, list(masters), self.device):
            masters[name].copy_(self.shards.parts[name].cut(whole))
        self.refresh()
        flat_slots = [key for key, tensor in slots.items() if tensor.ndim]
        for key, whole in self.shards.distribute(optimizer, flat_slots, self.device):
            slots[key].view(-1).copy_(self.shards.parts[key.rpartition(".")[0]].cut(whole))
        counts = {key: float(tensor) for key, tensor in optimizer.items() if not tensor.ndim}
        self._set_steps(self.ranks.share(counts), slots)

    def _set_steps(self, counts: dict[str, float], slots: dict[str, Tensor]) -> None:
        """AdamW's step counts: one a flat group, hence equal for the parameters in it."""
        sharing: dict[int, list[str]] = {}
        for key in counts:
            sharing.setdefault(slots[key].data_ptr(), []).append(key)
        for keys in sharing.values():
            slots[keys[0]].fill_(common_steps(keys[0], {counts[key] for key in keys}))

    @contextmanager
    def whole_model(self) -> Iterator[Transformer | None]:
        """See `Engine.whole_model`. Stage 3 and spread experts: every rank needs memory for all of them meanwhile."""
        with ExitStack() as stack:
            if self._own is not None:
                stack.enter_context(self._own.together())
            if self.stage == 3:
                stack.enter_context(gathered(list(self._parameters.values())))
                stack.enter_context(without_hooks(self.model))
            yield self.model if self.ranks.first else None

    def close(self) -> None:
        """See `Engine.close`."""
        self._ds.destroy()
