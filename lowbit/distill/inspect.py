"""Looking into a cache: what it holds, and whether it still is what its teacher would say."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowbit.configs.schema import DataConfig, EngineConfig
from lowbit.configs.schema_distill import CacheConfig, DistillConfig, Estimator, TeacherConfig
from lowbit.configs.strict import build
from lowbit.data.dataset import prepare_data
from lowbit.data.loader import SampleOrder
from lowbit.data.permutation import Permutation
from lowbit.distill.codec import Decoded, decode
from lowbit.distill.making import CacheMaker
from lowbit.distill.shards import Cache, require_same, require_text, settings_of
from lowbit.distill.teacher import open_teacher
from lowbit.errors import CheckpointError, ConfigError, DataError
from lowbit.trainer.hardware import pick_device

logger = logging.getLogger("lowbit")

CLOSE = 0.05
"""Nats by which the mean entropy of re-scored rows may differ on another device before it is another teacher."""
AGREE = {Estimator.varopt: 0.25, Estimator.multinomial: 0.25, Estimator.gumbel: 0.75, Estimator.topk: 0.75}
"""Share of a row's weight that must lie on the same ids as in the stored row, in at least half of the rows. Noise is
keyed by the position: in FP32 nearly all agree on any device. Another BF16 changes tail draws of large vocabularies: of
128,000 tokens at 6 nats, rows of varopt and multinomial keep 0.6 on average, at 8.6 nats 0.35; the others, which draw
each token by itself or not at all, 0.95. Rows of anything else have next to nothing in common."""
ALIKE = 0.95
"""The same share, on average over rows whose ids are equal: codes are 1/16 nat apart, and rounded by the same noise."""


@dataclass(frozen=True)
class Rescored:
    """What re-scoring found."""

    samples: int
    identical: int
    """Samples whose bits came out the same."""
    entropy_difference: float
    """Mean absolute difference of the stored entropies, nats."""
    agreeing: float
    """Share of rows with targets that agree (`AGREE`) with the stored ones."""
    alike: float
    """Weight on the same ids where those are equal, of all; on average over such rows."""


def statistics(cache: Cache, folder: Path) -> list[str]:
    """The lines that `lowbit distill stats` prints."""
    layout, identity = cache.layout, cache.identity
    positions = cache.samples * cache.length
    each = cache.bytes / positions
    rows = sum(s.totals["rows"] for s in cache.shards)
    totals = {key: sum(s.totals[key] for s in cache.shards) / max(rows, 1) for key in ("entropy", "named", "rest")}
    teacher, share = identity["teacher"], max(0.0, 1 - totals["rest"])  # rounded, the rest may be above 1
    named = {
        "varopt": f"{totals['named']:.1f} of {layout.targets} entries exact, with {share:.1%} of the mass",
        "topk": f"{layout.targets} exact entries with {share:.1%} of the mass; biased, a baseline",
        "gumbel": f"{layout.targets} entries, drawn without replacement",
        "multinomial": f"{totals['named']:.1f} different entries of {layout.targets} draws",
    }
    return [
        str(folder),
        f"  teacher      {teacher['model']['layers']} layers of width {teacher['model']['width']}, step "
        f"{teacher['step']}, {teacher['compute']}, digest {teacher['digest'][:12]}",
        f"  data         {identity['data']['fingerprint'][:12]}, tokenizer {identity['tokenizer'][:12]}, vocabulary "
        f"{layout.vocab_size:,}",
        f"  positions    {positions:,} ({cache.samples:,} samples of {cache.length}, order and noise of seed "
        f"{identity['seed']}), {rows:,.0f} with targets",
        f"  targets      {layout.estimator.value} at temperature {identity['temperature']:g}: "
        f"{named[layout.estimator.value]}",
        f"  entropy      {totals['entropy']:.3f} nats on average",
        f"  size         {cache.bytes / 1e6:,.1f} MB in {len(cache.shards)} shards, {each:.2f} bytes a position, "
        f"1/{2 * layout.vocab_size / each:,.0f} of BF16 distributions",
        f"  versions     {' '.join(f'{k} {v}' for k, v in cache.manifest.get('versions', {}).items())}",
    ]


def unchecked(cache: Cache, samples: int) -> str | None:
    """What `verify`, re-scoring so many samples, cannot vouch for, in a line; None if it is nothing."""
    if "identity_sha256" in cache.manifest:
        return None
    found = (
        f"edits of them only rows that the teacher reads again, here {samples} samples, show"
        if samples
        else "edits of them are not looked for; --samples 64 finds them"
    )
    return (
        f"its manifest is of an earlier version, without a hash of its settings: {found}; a cache made anew by "
        "`lowbit distill cache` has one"
    )


def rescore(cache: Cache, samples: int, seed: int, device: str, teacher_path: str | None = None) -> Rescored:
    """Have the teacher read random samples again and compare with the stored rows.

    They are taken in the cache's micro-batches, so that on the machine that made it every bit must come out the same.

    Raises: DataError when teacher or data are others than the cache's, or the rows do not belong to them.
    """
    made = cache.manifest.get("made_with")
    if not isinstance(made, dict):
        raise DataError(f"{cache.folder}: the manifest does not say what the cache was made with")
    try:
        data_config = build(DataConfig, made["data"])
        teacher_config = build(TeacherConfig, made["teacher"])
    except (ConfigError, KeyError) as error:
        raise DataError(f"{cache.folder}: the manifest's made_with was edited or damaged: {error}") from None
    if teacher_path:
        data_config = _moved(data_config, Path(teacher_config.path), Path(teacher_path).expanduser())
        teacher_config = replace(teacher_config, path=teacher_path)
    where = pick_device(device)
    try:
        teacher = open_teacher(teacher_config, EngineConfig(), where)
    except (ConfigError, CheckpointError) as error:
        hint = "" if teacher_path else "; if it was moved, name its folder with --teacher FOLDER"
        raise DataError(f"{cache.folder}: cannot open its teacher: {error}{hint}") from error
    data = prepare_data(data_config, logger.info)
    maker = CacheMaker(
        cache.folder, _settings(cache, data_config, teacher_config), cache.samples * cache.length, teacher, data
    )
    require_same(cache.folder, cache.identity, maker.identity, "was made from something else")
    order = SampleOrder(data, int(cache.identity["seed"]))
    size = int(cache.identity["micro_batch"])
    same, drift, count = 0, 0.0, 0
    shares, equal = [], []
    groups = cache.samples // size
    chosen = Permutation(groups, "verify", seed)(np.arange(min(groups, -(-samples // size)), dtype=np.int64))
    for first in (chosen * size).tolist():
        numbers = np.arange(first, first + size, dtype=np.int64)
        batch, stored = data.training_batch(*order.locate(numbers)), cache.read(numbers)
        require_text(cache, numbers, stored, batch)
        words, sizes, _ = maker.rows(batch, first)
        starts = sizes.cumsum(0) - sizes
        pairs = zip(_split(words, starts), _split(stored.words, stored.starts), strict=True)
        same += sum(torch.equal(here, there) for here, there in pairs)
        here = decode(cache.layout, words, starts, cache.length)
        there = decode(cache.layout, stored.words, stored.starts, cache.length)
        share, identical = in_common(here, there)
        learned = batch.weights != 0
        shares.append(share[learned])
        equal.append(identical[learned])
        drift += float((here.entropy - there.entropy).abs().mean()) * size
        count += size
    least = AGREE[cache.layout.estimator]
    common, ids = torch.cat(shares), torch.cat(equal)
    alike = float(common[ids].mean()) if bool(ids.any()) else 1.0
    agreeing = float((common >= least).float().mean()) if len(common) else 1.0
    found = Rescored(count, same, drift / count, agreeing, alike)
    wrong = _not_the_teachers(found, least)
    if wrong:
        raise DataError(
            f"{cache.folder}: {count - same} of {count} re-scored samples differ, {wrong}: these rows are not this "
            "teacher's; delete the folder and run `lowbit distill cache` again, or name its teacher with --teacher"
        )
    return found


def in_common(here: Decoded, there: Decoded) -> tuple[Tensor, Tensor]:
    """Of rows [B, T]: the part of the weights that lies on the same ids, and whether the ids are equal."""
    one, other = (_by_id(rows) for rows in (here, there))
    least = torch.zeros_like(here.entropy)
    for ids, weights in zip(other.ids.unbind(2), other.weights.unbind(2), strict=True):
        found = torch.where(one.ids == ids[:, :, None], one.weights, 0.0).sum(dim=2)
        least += torch.minimum(found, weights)
    most = torch.maximum(one.weights.sum(dim=2), other.weights.sum(dim=2))
    share = torch.where(most > 0, least / most, 1.0)  # empty on both sides
    return share, (one.ids == other.ids).all(dim=2)


def _by_id(rows: Decoded) -> Decoded:
    """Entries by rising id; those without weight first, with the id -1."""
    ids = torch.where(rows.weights > 0, rows.ids, -1)
    ids, order = ids.sort(dim=2)
    return Decoded(ids, torch.where(ids < 0, 0.0, rows.weights.gather(2, order)), rows.entropy)


def _not_the_teachers(found: Rescored, least: float) -> str | None:
    """What differs by more than another device explains, in words."""
    if found.entropy_difference > CLOSE:
        return f"by {found.entropy_difference:.3f} nats of entropy on average"
    if found.agreeing < 0.5:
        return f"and only {found.agreeing:.0%} of their rows have {least:.0%} of the weight on the same ids"
    if found.alike < ALIKE:
        return f"and where their ids are the same only {found.alike:.0%} of the weights are"
    return None


def _moved(data: DataConfig, old: Path, new: Path) -> DataConfig:
    """The data's settings with a tokenizer that lay in the teacher's folder taken from where that is now."""
    path = Path(data.tokenizer.path)
    if not data.tokenizer.path or not path.is_relative_to(old):
        return data
    return replace(data, tokenizer=replace(data.tokenizer, path=str(new / path.relative_to(old))))


def _settings(cache: Cache, data: DataConfig, teacher: TeacherConfig) -> DistillConfig:
    """The settings that would make this cache."""
    own = CacheConfig(**settings_of(cache.identity))
    return replace(DistillConfig(), data=data, teacher=teacher, cache=own)


def _split(words: Tensor, starts: Tensor) -> Iterator[Tensor]:
    ends = [*starts.tolist()[1:], len(words)]
    for begin, end in zip(starts.tolist(), ends, strict=True):
        yield words[begin:end]
