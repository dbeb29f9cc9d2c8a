"""The generation engine: slots that never wait, one reading of a prompt for all of its samples, blocks shared by name.

    loop:  free slots take waiting samples (their prompts read together, each sample its own first token)
           one step: every running row reads its token and draws the next
           rows that ended leave

It serves `generate`, evaluation, teachers and the rollouts of RL. A row ends at `max_new_tokens` or with a stop id,
which is part of it. What a row says depends on (seed, key, sample, position) and the weights, and not on slots, batch
mates or order: masks keep rows apart, noise is keyed, and low-bit activations are scaled row by row. Sums in another
order still differ in their last bits, and with them, now and then, a token. `deterministic=True` takes that away, too:
every step computes all slots, a prompt is read alone in pieces of one block, and attention on a CPU goes over the
whole table; each number is then the result of the same sums whatever else is going on, at some cost in speed.

**On a GPU** a step is one CUDA graph, drawing included, and the host is one step behind: it launches the next step,
then looks at the tokens of the last one. A row that has ended may therefore compute one token more, which nobody sees.
Graphs are captured for some numbers of slots and stay good when weights are replaced, which happens in place.

**New weights** may come between two steps, from another thread: each token has the version it was drawn with. Rows that
run go on with the keys of their old tokens (as other asynchronous samplers do); the prefix cache keeps nothing of them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import isnan
from threading import Lock, RLock

import torch
from torch import Tensor

from lowbit.errors import ConfigError, NonFiniteError
from lowbit.infer.blocks import BlockPool
from lowbit.infer.cache import PagedCache
from lowbit.infer.fused import exchange, join
from lowbit.infer.graphs import Steps, bucket
from lowbit.infer.kv_codec import KvCodec, KvFormat
from lowbit.infer.native import nativise
from lowbit.infer.packed import pack_layers
from lowbit.infer.precision import shadow
from lowbit.infer.reading import Reader
from lowbit.infer.requests import Request, Sample, WeightsReport, check_requests
from lowbit.infer.sampling import SamplingConfig
from lowbit.infer.slots import Drawn, Group, Noise, Row, Slots, groups_of
from lowbit.infer.weights import HeldWeights
from lowbit.models.transformer import Transformer
from lowbit.quant.resolve import PrecisionPolicy

CPU_BLOCK, GPU_BLOCK = 16, 64
"""Tokens of a block."""
EVEN = 16
"""Slots of a deterministic engine are a multiple of this: a CPU's matrix products sum the rows that are left over, when
they go through a matrix 4, 8 or 16 rows at a time, in another order."""
CPU_PREFILL, GPU_PREFILL = 2048, 16384
"""Tokens that a prefill reads at once."""


class EmbeddedSampler:
    """See `requests.Sampler`."""

    def __init__(
        self,
        model: Transformer,
        eot_id: int | None,
        policy: PrecisionPolicy | None = None,
        *,
        slots: int = 64,
        kv: KvFormat = KvFormat.auto,
        deterministic: bool = False,
        share: bool = False,
        block: int | None = None,
        prefill_tokens: int | None = None,
        graphs: bool = True,
        packed: bool = True,
        fused: bool = True,
        device: torch.device | None = None,
        recording: "RLock | None" = None,
    ) -> None:
        """
        Args:
            model: on its device, with its weights. It is not changed: the engine has modules of its own.
            eot_id: always ends a row, where there is one.
            policy: whose sampler stage the engine computes in; None: what `model` computes in now.
            slots: rows that run at once.
            kv: how keys and values are stored.
            share: use the model's own parameters (`update` then only derives anew what products read); else copies.
            block: tokens of a block of the cache. prefill_tokens: most tokens that are read at once.
            graphs, packed: on a GPU, capture the decoding step; multiply by weights in few bits where that is faster,
                and not by BF16 copies of them. fused: in BF16 on a GPU, compute a layer in fewer kernels.
            device: where the copies are; None: where `model` is. If not the current GPU, see `elsewhere.py`.
            recording: held while a step is captured; see `graphs.py`.

        Raises:
            ConfigError: a precision whose activations are scaled across the batch; no slots.
        """
        if slots < 1:
            raise ConfigError(f"slots={slots} must be at least 1")
        self.device = device or model.head_weight.device
        gpu = self.device.type == "cuda"
        self.model = shadow(model, policy, own=not share, native=gpu and packed, device=self.device)
        self.model.eval()
        self.packed = pack_layers(self.model) + nativise(self.model) if packed else 0
        """Layers that multiply by weights in few bits, and not by BF16 copies of them."""
        fuse = gpu and fused and self.model.compute_dtype is torch.bfloat16
        if fuse:
            exchange(self.model)
        self.eot_id, self.deterministic = eot_id, deterministic
        self.slots = -(-slots // EVEN) * EVEN if deterministic else slots
        self.weights = HeldWeights(self.model, share)
        if fuse:
            join(self.model, self.weights)
        self.version = 0
        self.codec = KvCodec.of(kv, self.model.compute_dtype)
        self.block = block if block is not None else GPU_BLOCK if gpu else CPU_BLOCK
        least = 16 if gpu else 1
        if self.block < least or (gpu and self.block & (self.block - 1)):
            raise ConfigError(f"block={self.block}: choose {'a power of two from 16 on' if gpu else 'at least 1'}")
        self.prefill_tokens = prefill_tokens or (GPU_PREFILL if gpu else CPU_PREFILL)
        self._graphs = graphs and gpu
        self._recording = recording or RLock()
        self._allocated: tuple[PagedCache, BlockPool, Slots, Steps, Reader] | None = None
        self._lock = Lock()
        self._running = Lock()

    # What one calls -------------------------------------------------------------------------------------------

    def sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> list[list[Sample]]:
        """See `requests.Sampler.sample`."""
        groups = self._groups(requests, seed)
        for _ in self._run(groups, sampling, seed, stop_ids):
            pass
        return [[row.result() for row in group.rows] for group in groups]

    def stream(
        self, request: Request, sampling: SamplingConfig, *, seed: int, stop_ids: Sequence[int] = ()
    ) -> Iterator[int]:
        """The tokens of a request for one sample, each as soon as it is there. Errors are raised at the call."""
        groups = self._groups([request], seed)
        return (token for _, token in self._run(groups, sampling, seed, stop_ids))

    def update(self, weights: Iterable[tuple[str, Tensor]] = (), version: int | None = None) -> WeightsReport:
        """See `requests.Sampler.update`; `version`: one more than the last, if not given."""
        with self._lock:
            new = self.version + 1 if version is None else version
            if self._allocated is not None:
                self._pool.forget()
            report = self.weights.update(weights, new)
            self.version = new
            return report

    @property
    def prefix_hits(self) -> int:
        """Tokens of prompts that were found in the prefix cache so far."""
        return 0 if self._allocated is None else self._pool.hits

    def _groups(self, requests: Sequence[Request], seed: int) -> list[Group]:
        self.weights.require_current()
        check_requests(requests, seed, self.model.vocab_size, self.model.config.max_sequence)
        return groups_of(requests)

    # The loop -------------------------------------------------------------------------------------------------

    def _run(
        self, groups: list[Group], sampling: SamplingConfig, seed: int, stop_ids: Sequence[int]
    ) -> Iterator[tuple[Row, int]]:
        """Run everything; gives each token with its row when the host knows it."""
        if not groups:
            return
        if not self._running.acquire(blocking=False):
            raise ConfigError("the sampler is running already: one call at a time, or an engine of its own for each")
        try:
            stops = set(stop_ids) | (set() if self.eot_id is None else {self.eot_id})
            noise = Noise([row for group in groups for row in group.rows], seed, self.device)
            with self._lock:
                self._reserve(groups)
            waiting, pending = deque(groups), deque[Drawn]()
            while waiting or self._state.rows or pending:
                while waiting and self._state.free:
                    with self._lock, torch.no_grad():
                        first = self._admit(waiting, noise, sampling)
                    if first is None:
                        break
                    pending.append(first)
                    if not self._lag:
                        yield from self._take(pending, 0, stops)
                if self._state.rows:
                    with self._lock, torch.no_grad():
                        pending.append(self._step(sampling))
                yield from self._take(pending, self._lag, stops)
                if not self._state.rows:
                    yield from self._take(pending, 0, stops)
        except NonFiniteError:
            self._allocated = None  # what is not finite may be among the keys
            raise
        finally:
            self._abandon(groups)
            self._running.release()

    @property
    def _lag(self) -> int:
        """Steps that the host is behind."""
        return 1 if self.device.type == "cuda" else 0

    def _take(self, pending: deque[Drawn], leave: int, stops: set[int]) -> Iterator[tuple[Row, int]]:
        """Give rows the tokens that are there, but for the last `leave` steps; those that end leave their slots."""
        while len(pending) > leave:
            drawn = pending.popleft()
            if drawn.ready is not None:
                drawn.ready.synchronize()
            ended = []
            for row, (token, logprob) in zip(drawn.rows, drawn.values.tolist(), strict=False):
                if row.finish_reason is not None:
                    continue  # it ended while this step was on its way
                if isnan(logprob):
                    raise NonFiniteError(
                        f"the logits behind token {row.group.length + len(row.tokens)} of prompt key "
                        f"{row.group.request.key} are not finite: are the weights, or their scales, broken?"
                    )
                row.tokens.append(int(token))
                row.logprobs.append(logprob)
                row.versions.append(drawn.version)
                if row.tokens[-1] in stops:
                    row.finish_reason = "stop"
                elif len(row.tokens) == row.group.request.max_new_tokens:
                    row.finish_reason = "length"
                if row.finish_reason is not None:
                    ended.append(row)
                yield row, row.tokens[-1]
            if ended:
                with self._lock:
                    self._end(ended)

    def _end(self, rows: list[Row]) -> None:
        """Rows have ended: their slots and blocks are free, their full blocks known to later turns."""
        self._state.end(rows)
        for row in rows:
            if not self.deterministic and set(row.versions) == {self.version}:
                known = [*row.group.request.prompt, *row.tokens[:-1]]  # the last token's keys: not needed, not there
                self._pool.register(known, row.blocks, self.version)
            self._pool.release(row.blocks)
            row.blocks = []

    def _abandon(self, groups: list[Group]) -> None:
        """Nothing of these runs any more, whatever happened."""
        if self._allocated is None:
            return
        self._state.clear()
        holders: list[Group | Row] = [*groups, *(row for group in groups for row in group.rows)]
        for holder in holders:
            self._pool.release(holder.blocks)
            holder.blocks = []

    # Memory ---------------------------------------------------------------------------------------------------

    @property
    def _cache(self) -> PagedCache:
        assert self._allocated is not None
        return self._allocated[0]

    @property
    def _pool(self) -> BlockPool:
        assert self._allocated is not None
        return self._allocated[1]

    @property
    def _state(self) -> Slots:
        assert self._allocated is not None
        return self._allocated[2]

    @property
    def _steps(self) -> Steps:
        assert self._allocated is not None
        return self._allocated[3]

    @property
    def _reader(self) -> Reader:
        assert self._allocated is not None
        return self._allocated[4]

    def _reserve(self, groups: list[Group]) -> None:
        """Room for these requests; what is there grows and keeps its contents."""
        rows = sum(len(group.rows) for group in groups)
        count = self.slots if self.deterministic else min(self.slots, rows)
        longest = max(group.request.max_new_tokens for group in groups)
        table = max(self._blocks(group.end) for group in groups)
        blocks = 1 + (count + 1) * table
        if self.deterministic:
            table = self._blocks(self.model.config.max_sequence)
        if self._allocated is not None:
            state = self._state
            count, table, longest = max(count, state.count), max(table, state.table), max(longest, state.longest)
            blocks = max(blocks, self._pool.blocks)
            if (count, table, longest, blocks) == (state.count, state.table, state.longest, self._pool.blocks):
                return
            self._pool.grow(blocks)
            pool, old = self._pool, self._cache
        else:
            pool, old = BlockPool(blocks, self.block), None
        cache = PagedCache(self.model.config, blocks, self.block, self.codec, self.device, old)
        slots = Slots(count, table, longest, self.device)
        steps = Steps(self.model, self.weights, cache, slots, self._graphs, self._recording)
        reader = Reader(self.model, cache, pool, self.prefill_tokens, table if self.deterministic else None)
        self._allocated = (cache, pool, slots, steps, reader)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    # Prompts --------------------------------------------------------------------------------------------------

    def _admit(self, waiting: deque[Group], noise: Noise, sampling: SamplingConfig) -> Drawn | None:
        """Start waiting samples in the free slots, and draw their first tokens; None if no memory is free yet."""
        starting: list[Row] = []
        reading: list[Group] = []
        copies: list[tuple[int, int]] = []
        while waiting and self._state.free > len(starting):
            group = waiting[0]
            if group.hidden is not None and group.version != self.version:
                self._pool.release(group.blocks)
                group.blocks, group.hidden = [], None
            if group.hidden is None and group not in reading:
                if not self._place_prompt(group):
                    break
                reading.append(group)
            row = group.rows[group.started]
            if not self._place_row(group, row, copies):
                break
            starting.append(row)
            group.started += 1
            if group.started == len(group.rows):
                waiting.popleft()
        self._reader.read(reading, self.version)
        if not starting:
            return None
        if copies:
            sources, targets = torch.tensor(copies, device=self.device).unbind(1)
            self._cache.copy_blocks(sources, targets)
        noise.give(starting)
        hidden = [row.group.hidden for row in starting if row.group.hidden is not None]
        first = [row.noise[:1] for row in starting if row.noise is not None]
        values = self._draw(torch.stack(hidden), torch.cat(first), sampling)
        self._state.start(starting, values[:, 0].long())
        for row in starting:
            if row.group.started == len(row.group.rows):
                row.group.hidden = None
        return self._send(starting, values)

    def _place_prompt(self, group: Group) -> bool:
        """Blocks for a prompt: those that are known already, and new ones. False if there are not so many."""
        found = self._pool.match(group.request.prompt, self.version)
        new = self._pool.allocate(self._blocks(group.length) - len(found))
        if new is None:
            self._pool.release(found)
            return False
        group.blocks, group.cached = found + new, len(found) * self.block
        return True

    def _place_row(self, group: Group, row: Row, copies: list[tuple[int, int]]) -> bool:
        """Blocks for a row: the prompt's full ones, a copy of its last one, and new ones; the last row takes all."""
        last = group.started + 1 == len(group.rows)
        full = len(group.blocks) if last else group.length // self.block
        own = self._pool.allocate(self._blocks(group.end) - full)
        if own is None:
            return False
        row.blocks = group.blocks[:full] + own
        if last:
            group.blocks = []
        else:
            self._pool.hold(group.blocks[:full])
            if full < len(group.blocks):
                copies.append((group.blocks[full], own[0]))
        return True

    # Steps ----------------------------------------------------------------------------------------------------

    def _draw(self, hidden: Tensor, noise: Tensor, sampling: SamplingConfig) -> Tensor:
        """First tokens and logprobs behind hidden states [rows, width]: FP64 [rows, 2]."""
        rows = len(hidden)
        if self.deterministic and rows < self.slots:
            more = self.slots - rows
            hidden, noise = (torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in (hidden, noise))
        return self._steps.draw(hidden, noise, sampling)[:rows]

    def _step(self, sampling: SamplingConfig) -> Drawn:
        """Every running row reads its token and draws the next."""
        rows = list(self._state.rows)
        if self.deterministic:
            size = self._state.count
        else:
            size = bucket(len(rows), self._state.count) if self._graphs else len(rows)
        table = self._state.table
        if not (self.deterministic or self.device.type == "cuda"):
            table = max(self._blocks(row.group.length + row.drawn) for row in rows)
        return self._send(rows, self._steps.run(size, table, sampling))

    def _send(self, rows: list[Row], values: Tensor) -> Drawn:
        """Begin to bring FP64 [rows or more, 2] to the host."""
        values = values[: len(rows)]
        for row in rows:
            row.drawn += 1
        if self.device.type != "cuda":
            return Drawn(rows, values, None, self.version)
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        there.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Drawn(rows, there, event, self.version)
