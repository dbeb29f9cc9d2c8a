"""DeepSpeed, imported the way this project needs it, and our gradient reductions in place of its own.

What is attached to, by stage (DeepSpeed 0.19.8; none of it is a public interface, hence the check of the version):

    0        nothing: the engine's own all-reduce is off, and ours runs before the step
    1 and 2  `optimizer.average_tensor`, which gets a flat bucket of gradients while the backward pass goes on
    3        `optimizer.__avg_scatter_grads`, which gets the whole gradients of a bucket and returns this rank's parts
"""

import logging
import os
import warnings
from types import ModuleType
from typing import Any

from lowbit.errors import ConfigError

OLDEST, BEFORE = (0, 19, 8), (0, 20)
"""Versions whose inner workings are known here: from the first on, below the second."""


def load_deepspeed(device_type: str) -> ModuleType:
    """Import DeepSpeed for "cpu" or "cuda": quiet, nothing compiled on the way, no MPI.

    Raises:
        ConfigError: it is not installed, or its version is not one that this project knows from the inside.
    """
    os.environ["DS_ACCELERATOR"] = device_type  # else it looks for one, and takes a GPU where there is one
    os.environ.setdefault("LOCAL_RANK", "0")  # it insists on this one, also when there is one process
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # names it still uses
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(f"engine.kind=deepspeed needs a package ({error}): pip install deepspeed==0.19.8") from error
    check_version(deepspeed.__version__)
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its shared-memory collectives for CPUs would be compiled at the first use, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module: ModuleType = deepspeed
    return module


def check_version(version: str) -> None:
    """Raise ConfigError for a version of DeepSpeed that this project does not know."""
    digits = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= digits < BEFORE:
        oldest, before = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
        raise ConfigError(
            f"deepspeed {version} is installed, and engine.kind=deepspeed knows those from {oldest} to below {before} "
            f"from the inside: pip install deepspeed=={oldest}"
        )


def zero_config(stage: int, bucket_numbers: int, largest_vector: int, overlap: bool) -> dict[str, Any]:
    """DeepSpeed's settings for FP32 parameters, our own optimizer, loss scaling and clipping.

    Args:
        bucket_numbers: gradients in a bucket. largest_vector: size of the largest 1-D parameter; up to this size
            ZeRO 3 leaves parameters whole. overlap: reduce on a stream of its own.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "reduce_bucket_size": bucket_numbers,
        "round_robin_gradients": stage in (1, 2),
        "stage3_param_persistence_threshold": largest_vector,
    }
    if stage in (1, 2):
        zero["compute_grad_norm"] = False
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if stage < 3:
        config["gradient_allreduce_op"] = "sum"
    return config
