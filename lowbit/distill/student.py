"""The student: the one training loop with another objective and another source of batches.

    loss = alpha D(teacher, student) + (1 - alpha) cross-entropy        per token, over the stored targets

`kl` in the metrics is the mean of D over a step's tokens with its standard error `kl_se`. For unbiased targets and in
the first pass over a cache it is an unbiased estimate of KL(teacher || student), never clamped: near the optimum single
steps may be negative. Later the student knows the stored draws and `kl` lies below: a run of several passes is told so.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowbit.configs.paths import with_absolute_paths
from lowbit.configs.schema_distill import CacheConfig, DistillConfig, DistillLossConfig, Divergence, Estimator
from lowbit.configs.stored import flatten, plain, save_config
from lowbit.configs.strict import show
from lowbit.configs.validate_distill import student_config, token_limit
from lowbit.data.batch import Batch
from lowbit.data.dataset import Dataset
from lowbit.data.loader import Loader
from lowbit.distill.batches import CachedLoader, DistilledBatch
from lowbit.distill.shards import Cache, open_cache, require_same, settings_of
from lowbit.errors import CheckpointError, ConfigError, NonFiniteError
from lowbit.models.sparse_head import DistillTerms, SparseTargets, lm_head_distill_loss
from lowbit.models.transformer import Transformer
from lowbit.trainer.checkpoint import Snapshot
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.loaded import shown_path
from lowbit.trainer.loop import Position
from lowbit.trainer.metrics import MetricsLog
from lowbit.trainer.objective import Objective, ObjectiveOutput
from lowbit.trainer.run import Pretraining, RunResult
from lowbit.trainer.schedule import sequences_at

logger = logging.getLogger("lowbit")

_DECISIVE = ("tokenizer", "sequence_length", "document_mask", "held_out")
"""Settings of the data, without their sources, that decide which tokens a sample has."""


@dataclass(frozen=True)
class Distilled:
    """Trains a model on the targets that its batches carry."""

    terms: DistillTerms
    renormalise: bool = False
    """Divide the weights by their sum: for the likeliest tokens alone, whose forward KL would have no minimum."""

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveOutput:
        assert isinstance(batch, DistilledBatch) and batch.teacher is not None
        teacher = batch.teacher
        if self.renormalise:
            teacher = renormalised(teacher, [stored.layout.targets for stored in batch.rows])
        hidden = model(batch.tokens, batch.visibility)  # [B, T, width]
        out = lm_head_distill_loss(
            hidden.flatten(0, 1),
            model.head_weight,
            batch.targets.flatten(),
            batch.weights.flatten(),
            teacher,
            self.terms,
            vocab_size=model.vocab_size,
            softcap=model.config.logit_softcap,
        )
        moments = torch.stack([out.divergence_sum, out.divergence_square_sum])
        return ObjectiveOutput(out.loss_sum, out.nll_sum, {"kl": moments})


def renormalised(teacher: SparseTargets, lists: list[int]) -> SparseTargets:
    """Each teacher's weights divided by their sum, and the entropies of what that makes, so that D is a divergence.

    `lists`: entries of each teacher. Rows without targets stay as they are; rounding may leave a weight below zero.
    """
    parts = []
    for weights in teacher.weights.clamp(min=0).split(lists, dim=1):  # type: ignore[no-untyped-call]
        total = weights.sum(dim=1, keepdim=True)
        parts.append(weights / torch.where(total > 0, total, 1.0))
    entropies = [-torch.xlogy(weights, weights).sum(dim=1) for weights in parts]
    share = 1.0 / len(lists)
    weights = torch.cat(parts, dim=1) * share
    return SparseTargets(teacher.ids, weights, torch.stack(entropies).mean(dim=0))


def open_caches(config: DistillConfig, folder: Path, data: Dataset, report: bool = True) -> list[Cache]:
    """The caches that a student learns from, checked against its data, its loss and each other.

    Raises: DataError, ConfigError, one line, naming the field in which they do not fit.
    """
    say = logger.info if report else (lambda _: None)
    caches = [open_cache(path, report=say) for path in (folder, *(Path(p).expanduser() for p in config.cache.more))]
    wanted = {
        "tokenizer": data.tokenizer.digest,
        "vocab_size": data.tokenizer.vocab_size,
        "sequence_length": data.sequence_length,
        "data": data.describe(),
        "temperature": config.cache.temperature,
    }
    first = caches[0]
    for cache in caches:
        wish = remedy(config, cache, data.tokenizer.digest)
        what = f"does not fit the student (there: the cache; here: this run; {wish})"
        require_same(cache.folder, {key: cache.identity[key] for key in wanted}, wanted, what)
        shared = ("seed", "samples")
        require_same(
            cache.folder,
            {key: cache.identity[key] for key in shared},
            {key: first.identity[key] for key in shared},
            f"holds other samples than {first.folder}, so they cannot be averaged",
        )
        cache.check_ids()
    require_different(caches)
    check_loss(config.loss, caches)
    if report and (found := ignored(config, first)):
        logger.warning("%s has its own settings, so these are ignored: %s", shown_path(first.folder), found)
    return caches


def remedy(config: DistillConfig, cache: Cache, tokenizer: str) -> str:
    """What to give to learn from a cache that does not fit: the settings that it was made with, where they differ.

    `tokenizer`: digest of the student's. The same one may lie elsewhere.
    """
    made = cache.manifest.get("made_with")
    settings = made.get("data") if isinstance(made, dict) else None
    keys = [key for key in _DECISIVE if key != "tokenizer" or cache.identity["tokenizer"] != tokenizer]
    there: dict[str, Any] = {"cache.temperature": cache.identity["temperature"]}
    if isinstance(settings, dict):
        there |= flatten({"data": {key: settings[key] for key in keys if key in settings}})
    here = flatten(plain(with_absolute_paths(config)))
    wishes = [f"{key}={show(value)}" for key, value in there.items() if value is not None and value != here.get(key)]
    return f"it was made with {' '.join(wishes) or 'other data'}: give these, or another cache.path"


def require_different(caches: Sequence[Cache]) -> None:
    """Raises ConfigError where two caches are one: its teacher would count twice in the average, without a word."""
    seen: dict[str, Cache] = {}
    for cache in caches:
        other = seen.setdefault(cache_digest(cache), cache)
        if other is not cache:
            raise ConfigError(
                f"cache.more: {shown_path(cache.folder)} holds what {shown_path(other.folder)} does, and an average "
                "takes each cache once; leave it out"
            )


def ignored(config: DistillConfig, cache: Cache) -> str:
    """Settings of `cache` that were given (they are not the defaults) and are not those of the cache that is there."""
    given, plain, there = config.cache, CacheConfig(), settings_of(cache.identity)
    found = []
    for key in ("estimator", "targets", "seed"):
        value = getattr(given, key)
        if value not in (there[key], getattr(plain, key)):
            found.append(f"cache.{key}={show(value)} (there: {show(there[key])})")
    batch = there["micro_batch"] * cache.length
    if given.tokens is not None and -(-given.tokens // batch) * batch != there["tokens"]:
        found.append(f"cache.tokens={given.tokens} (there: {there['tokens']})")
    return ", ".join(found)


def check_loss(loss: DistillLossConfig, caches: Sequence[Cache]) -> None:
    """Raises ConfigError for a divergence that these targets cannot give."""
    estimators = {cache.layout.estimator for cache in caches}
    if loss.divergence is not Divergence.forward_kl:
        needs = (
            f"loss.divergence={loss.divergence.value}: needs the exact probabilities of one cache with cache.estimator"
        )
        if estimators != {Estimator.topk}:
            raise ConfigError(
                f"{needs}=topk, here {', '.join(sorted(estimators))}; sampled targets would bias it, "
                "loss.divergence=forward_kl takes them"
            )
        if len(caches) > 1:
            raise ConfigError(
                f"{needs}=topk, here are {len(caches)}, and it is not linear in the teacher, so it has no average over "
                "several; leave cache.more empty, or take loss.divergence=forward_kl"
            )
    if Estimator.topk in estimators and len(estimators) > 1:
        raise ConfigError("cache.more: topk caches (biased) cannot be averaged with sampled ones")


class Distillation(Pretraining):
    """A run whose batches come from a teacher's cache."""

    def __init__(
        self, config: DistillConfig, cache_dir: Path, run_dir: Path, ranks: Ranks, device: torch.device
    ) -> None:
        super().__init__(student_config(config), run_dir, ranks, device)
        self.distill = config
        self.cache_dir = cache_dir
        self.caches: list[Cache] = []

    def _make_loader(self) -> Loader:
        config = self.config
        first = self.ranks.first_does(lambda: open_caches(self.distill, self.cache_dir, self.data))
        self.caches = self.ranks.together(
            lambda: first or open_caches(self.distill, self.cache_dir, self.data, report=False)
        )
        for cache in self.caches if self.ranks.first else ():
            logger.info("%s", describe(cache))
        if warning := repeated(self.distill, self.caches[0]) if self.ranks.first else None:
            logger.warning("%s", warning)
        return CachedLoader(
            self.data,
            self.caches,
            seed=config.seed,
            sequences_at=lambda sample: sequences_at(config, sample),
            micro_batch=config.batch.micro_batch,
            rank=self.ranks.rank,
            world=self.ranks.world,
            prefetch=config.data.prefetch,
            pin=self.device.type == "cuda",
        )

    def execute(self) -> RunResult:
        """The whole run. Numbers that are not finite may come from damaged targets: then those are named.

        Raises: DataError for an id outside of the vocabulary in the step that failed.
        """
        try:
            return super().execute()
        except NonFiniteError:
            if isinstance(self.loader, CachedLoader):
                self.loader.require_ids()
            raise

    def _make_objective(self) -> Objective:
        loss = self.distill.loss
        biased = self.caches[0].layout.estimator is Estimator.topk
        if biased:
            logger.warning("topk targets are biased towards the likeliest tokens: a baseline, not distillation")
        return Distilled(
            DistillTerms(loss.divergence, loss.alpha, self.distill.cache.temperature, self.config.optim.z_loss),
            renormalise=biased and loss.divergence is Divergence.forward_kl,
        )

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"caches": [cache_digest(cache) for cache in self.caches]}

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | {"loss": plain(self.distill.loss)}

    def _resume(self, snapshot: Snapshot | None) -> Position:
        if snapshot is None:
            return super()._resume(snapshot)
        was, now = snapshot.meta["identity"].get("caches"), self._identity()["caches"]
        if was is None:
            raise CheckpointError(
                "the checkpoint is of a run without a teacher: to distil its model further, give another run_name and "
                "begin with its weights, init_from=FOLDER"
            )
        if was != now:
            raise CheckpointError(
                "the checkpoint learned from other teachers' targets than cache.path and cache.more hold now: "
                "go on with those, or start anew under another run_name"
            )
        position = super()._resume(snapshot)
        if changes := changed_loss(snapshot.meta.get("loss"), self.distill.loss):
            logger.warning("the loss of this run changes after step %d: %s", snapshot.step, "; ".join(changes))
        return position

    def _fill_folder(self, position: Position) -> MetricsLog:
        held = replace(self.distill.cache, **settings_of(self.caches[0].identity))  # whatever was given beside it
        save_config(replace(self.distill, cache=held), self.run_dir / "distill.yaml")
        return super()._fill_folder(position)


def repeated(config: DistillConfig, cache: Cache) -> str | None:
    """A line about a run that goes over sampled targets more than once; None for others, or a limit of time alone."""
    tokens, there = token_limit(config), cache.samples * cache.length
    if cache.layout.estimator is Estimator.topk or tokens is None or tokens <= there:
        return None
    return (
        f"the student goes over its cache {tokens / there:.3g} times: from the second on it learns the draws, too, "
        f"and kl is below the divergence from the teacher; a cache of cache.tokens={tokens} has new ones for every step"
    )


def changed_loss(saved: Mapping[str, Any] | None, loss: DistillLossConfig) -> list[str]:
    """Where a loss is not the one that a checkpoint remembers; what it does not (of an earlier version) is not told."""
    return [
        f"loss.{key}: {show(was)} so far, {show(now)} now"
        for key, now in plain(loss).items()
        if (was := (saved or {}).get(key, now)) != now
    ]


def cache_digest(cache: Cache) -> str:
    """What a checkpoint remembers of a cache: its content, wherever it lies."""
    return hashlib.sha256("".join(shard.sha256 for shard in cache.shards).encode()).hexdigest()


def describe(cache: Cache) -> str:
    """One line about a cache."""
    layout, positions = cache.layout, cache.samples * cache.length
    size = cache.bytes / positions
    return (
        f"cache {shown_path(cache.folder)}: {positions:,} positions, {layout.targets} targets by "
        f"{layout.estimator.value}, {size:.1f} bytes a position (1/{2 * layout.vocab_size / size:,.0f} of BF16 "
        f"distributions), temperature {cache.identity['temperature']:g}"
    )
