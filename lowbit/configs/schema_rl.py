"""Settings of `lowbit rl`: those of a run, then the task, its rewards, how rollouts are drawn, and what is trained for.

Of the run's own keys `batch.sequences` counts conversations an optimizer step and `batch.micro_batch` rows of
`data.sequence_length` tokens, filled with whole conversations; `precision.sampler` and `precision.trainer` are what the
two sides compute in. There are no documents: `data` only says which tokenizer.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from lowbit.configs.schema import RunConfig


class TaskKind(StrEnum):
    """Where problems come from."""

    add = "add"
    """Sums of two numbers of `size` digits."""
    sort = "sort"
    """`size` digits in ascending order."""
    reverse = "reverse"
    """`size` letters backwards."""
    countdown = "countdown"
    """A target from `size` numbers, each used once, with + - * /."""
    calculator = "calculator"
    """Products of numbers of `size` digits, with a calculator to ask: several turns."""
    file = "file"
    """A local .jsonl or .parquet file: GSM8K, MATH, verl, or prompt and answer."""
    reasoning_gym = "reasoning_gym"
    """A generator of the package reasoning-gym, by the name `dataset`."""


class Overlong(StrEnum):
    """What becomes of a completion that was cut off at `rollout.max_new_tokens`."""

    keep = "keep"
    """Its reward counts like any other."""
    zero = "zero"
    """Its reward is 0."""
    mask = "mask"
    """It counts in its group's baseline and is not trained on."""


@dataclass(frozen=True)
class TaskConfig:
    """What is learned."""

    kind: TaskKind = TaskKind.add
    size: int = 2
    """How large a problem is: digits, items or numbers, see `task.kind`."""
    path: str = ""
    """file: the problems."""
    held_out_path: str = ""
    """file: problems for evaluation alone; empty: a `held_out` share of `path`."""
    held_out: float = 0.0625
    """Share of problems (by hash of the prompt) kept for evaluation."""
    dataset: str = ""
    """reasoning_gym: name of the generator."""
    template: str = "{prompt}"
    """What the model reads; `{prompt}` is the problem. Special tokens of the tokenizer in it become their ids."""
    stop: list[str] = field(default_factory=list)
    """Tokens that end a completion beside the tokenizer's end-of-text, each by its text."""
    turns: int = 1
    """Most turns of a conversation; more than 1 for tasks whose environment answers."""
    examine: int = 256
    """Held-out problems that an evaluation has answered greedily."""


@dataclass(frozen=True)
class RewardConfig:
    """How answers are checked: in processes of their own, because a check may hang or crash."""

    function: str = ""
    """`package.module:function` in place of the task's own check: (completion, example) -> number, parts by name, or
    None."""
    workers: int = 1
    """Processes."""
    seconds: float = 10.0
    """A check that takes longer is killed and gives no reward."""
    failure_limit: float = 0.2
    """The run stops when a larger share of a rollout's checks gave no reward."""


class CacheFormat(StrEnum):
    """What the sampler's keys and values are stored in."""

    auto = "auto"
    """What the model computes in."""
    fp8 = "fp8"
    """E4M3; the trainer's attention has no such rounding, so the mismatch grows."""
    int8 = "int8"
    """The same with 8-bit integers."""


@dataclass(frozen=True)
class RolloutConfig:
    """How conversations are drawn."""

    samples: int = 8
    """Completions of each prompt: a group, whose mean reward is the baseline."""
    updates: int = 1
    """Optimizer steps on the conversations drawn at once; more than 1 is off-policy."""
    staleness: int = 0
    """Optimizer steps that the sampler may be behind: 0 draws, then trains; more draw while training goes on."""
    max_new_tokens: int = 16
    """Longest completion, of one turn."""
    temperature: float = 1.0
    top_k: int | None = None
    """null: all tokens. Anything else is refused: see top_p."""
    top_p: float = 1.0
    """1: all tokens. Less is refused, because the trainer's log-probabilities are of all tokens."""
    device: str = ""
    """Where conversations are drawn. Empty: where the trainer is; cpu or cuda:N: there, with copies of the weights.
    With staleness both GPUs then work at the same time."""
    slots: int = 256
    """Conversations drawn at the same time."""
    cache: CacheFormat = CacheFormat.auto
    seconds: float = 600.0
    """Longest wait for conversations; a longer one ends the run with a line that names what is missing."""
    empty_limit: int = 20
    """Rollouts in a row in which every group has equal rewards, before the run ends with an error."""
    show: int = 1
    """Conversations shown, and written to samples.jsonl, with each logged step."""


class Loss(StrEnum):
    """What is minimised; rho = pi / pi_proximal, A the advantage."""

    clip = "clip"
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), token by token (PPO, GRPO)."""
    gspo = "gspo"
    """The same with the geometric mean of rho over a conversation (GSPO)."""
    cispo = "cispo"
    """-sg(min(rho, cispo_max)) A log pi (CISPO): a clipped token keeps its gradient."""
    reinforce = "reinforce"
    """-A log pi."""


class Advantage(StrEnum):
    """From the rewards of a group to advantages."""

    mean = "mean"
    """r - mean."""
    std = "std"
    """(r - mean) / (std + 1e-4), of the group."""
    batch = "batch"
    """(r - mean of the group) / (std + 1e-4), of the whole rollout."""
    rloo = "rloo"
    """r - mean of the others in the group."""


class Reduction(StrEnum):
    """How tokens are weighed in a step's loss; always with the sums of the whole step."""

    tokens = "tokens"
    """Every token alike."""
    sequences = "sequences"
    """Every conversation alike: a token weighs 1 / tokens of its conversation."""
    fixed = "fixed"
    """Every token alike, divided by conversations * longest possible completion (Dr.GRPO)."""


class Correction(StrEnum):
    """What makes up for a sampler whose probabilities are not the trainer's; d = log pi_proximal - log pi_sampler."""

    none = "none"
    tis = "tis"
    """A token weighs min(exp(d), correction_max)."""
    icepop = "icepop"
    """A token weighs exp(d), and counts for nothing outside [band_low, band_high]."""
    sequence = "sequence"
    """A conversation whose exp(mean d) is outside [band_low, band_high] counts for nothing."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """What conversations are trained for."""

    name: str = "dapo"
    """Preset name, for display."""
    loss: Loss = Loss.clip
    advantage: Advantage = Advantage.mean
    reduction: Reduction = Reduction.tokens
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """clip: where A < 0 the loss is at most -dual_clip * A; null: unbounded."""
    cispo_max: float = 5.0
    kl: float = 0.0
    """Weight of KL(pi || reference), k3 estimate; 0 loads no reference."""
    reference: str = ""
    """Folder of the reference's run; empty: what this run began with."""
    entropy: float = 0.0
    """Weight of the entropy that is rewarded."""
    correction: Correction = Correction.tis
    correction_max: float = 2.0
    band_low: float = 0.5
    band_high: float = 2.0
    overlong: Overlong = Overlong.keep
    refill: int = 0
    """Rounds of further prompts drawn in place of groups whose rewards are all equal (DAPO's dynamic sampling)."""


@dataclass(frozen=True)
class RlTeacherConfig:
    """On-policy distillation: a teacher judges every token that the student drew."""

    path: str = ""
    """Folder of a run, or of a Hugging Face model, with this run's tokenizer; empty: none."""
    checkpoint: str = "latest"
    """Which checkpoint of a run."""
    coefficient: float = 1.0
    """Weight of log p_teacher - log p_student in a token's advantage."""
    only: bool = True
    """The task's rewards are reported and not learned from."""


class LoraTarget(StrEnum):
    """A kind of linear layer in the blocks."""

    all = "all"
    """Every one of them."""
    q = "q"
    k = "k"
    v = "v"
    out = "out"
    """The projection behind attention."""
    gate = "gate"
    up = "up"
    down = "down"


class LoraAlso(StrEnum):
    """What is no linear layer of a block."""

    norms = "norms"
    embedding = "embedding"
    head = "head"


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: the weights stay as they are, and a product of two thin matrices, added to each, is learned."""

    rank: int = 0
    """Columns of one and rows of the other; 0: no adapters, every weight trains."""
    alpha: float = 32.0
    """The product is multiplied by alpha / rank."""
    targets: list[LoraTarget] = field(default_factory=lambda: [LoraTarget.all])
    """Which layers have adapters."""
    also: list[LoraAlso] = field(default_factory=list)
    """What trains as a whole beside them."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on the task's own solutions before the first rollout."""

    steps: int = 0
    """0: none. Otherwise the most of them."""
    accuracy: float = 1.0
    """They end where so many greedy answers to held-out problems are right, if `check_steps` asks for looking."""
    check_steps: int = 0
    """Look at the accuracy every so many steps; 0: never."""
    examples: int = 64
    """Solved problems a step."""
    lr_scale: float = 1.0
    """Peak learning rates in them, as a multiple of the run's own."""


@dataclass(frozen=True)
class RlConfig(RunConfig):
    """Reinforcement learning from verifiable rewards: the keys of a run, then task, rewards, rollouts and loss."""

    run_name: str = "rl"
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    teacher: RlTeacherConfig = field(default_factory=RlTeacherConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
