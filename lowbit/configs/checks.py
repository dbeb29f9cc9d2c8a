"""How a setting is refused: one line that names the keys, their values, what is wrong, and a value that would work.

The files `validate*.py` say what is refused; each stage and each section of the settings has one.
"""

from typing import Any, NamedTuple

from lowbit.configs.schema import RunConfig
from lowbit.configs.strict import show
from lowbit.errors import ConfigError


class Range(NamedTuple):
    """Numbers from `low` to `high`, none of them infinite; `open_low` and `open_high` exclude the end."""

    low: float
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high or self.high == float("inf") else value <= self.high
        return above and below

    def words(self) -> str:
        low = f"{'greater than' if self.open_low else 'at least'} {_number(self.low)}"
        if self.high == float("inf"):
            return low
        return f"{low} and {'less than' if self.open_high else 'at most'} {_number(self.high)}"


def _number(value: float) -> str:
    """A bound as it may be typed: whole numbers with all their digits."""
    return str(int(value)) if value == int(value) else f"{value:g}"


COUNT = Range(1)
NATURAL = Range(0)
POSITIVE = Range(0, open_low=True)
FRACTION = Range(0, 1)
BETA = Range(0, 1, open_high=True)
INSIDE = Range(0, 1, open_low=True, open_high=True)


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key; numbers index lists."""
    for part in key.split("."):
        config = (
            config[part] if isinstance(config, dict) else config[int(part)] if part.isdigit() else getattr(config, part)
        )
    return config


def refuse(config: Any, *keys: str, why: str, works: str) -> ConfigError:
    """The error for a combination: `key=value key=value: why; works`."""
    given = " ".join(f"{key}={show(value_of(config, key))}" for key in keys)
    return ConfigError(f"{given}: {why}; {works}")


def check_ranges(config: RunConfig, ranges: dict[str, Range], examples: dict[str, Any] | None = None) -> None:
    """Raise ConfigError for the first number outside its range; null is inside every one.

    The error offers the key's default, or its entry of `examples` where the default is null.
    """
    defaults = type(config)()
    for key, allowed in ranges.items():
        value = value_of(config, key)
        if value is not None and not allowed.holds(value):
            example = (examples or {}).get(key, value_of(defaults, key))
            raise refuse(config, key, why=f"must be {allowed.words()}", works=f"{key}={show(example)} would work")


def nearest_divisor(number: int, wish: int) -> int:
    """The divisor of `number` nearest to `wish`, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wish), d))
