"""Tree-shaped sampling against the same prompt given as many times: tokens, log-probabilities, memory, errors."""

import dataclasses

import pytest
import torch

from lowbit.configs.schema import ModelConfig, MoeConfig
from lowbit.errors import ConfigError
from lowbit.infer.cache import StaticKVCache
from lowbit.infer.engine import Generator
from lowbit.infer.tree import TreeKVCache
from lowbit.models.transformer import Transformer

CONFIG = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=40, init_std=0.3)
VOCAB = 50
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]
LAYOUTS: dict[str, dict[str, object]] = {
    "plain": {},
    "local": {"windows": [3, 0]},
    "shared": {"kv_from": [0, 0, 2]},
    "experts": {"moe": MoeConfig(experts=4, expert_width=16)},
}


def _model(**changes: object) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), VOCAB)  # type: ignore[arg-type]
    model.init_weights(5)
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_branches_are_what_separate_rows_would_be(layout: str, temperature: float) -> None:
    generator = Generator(_model(**LAYOUTS[layout]), eot_id=7)
    settings = {"max_new_tokens": 12, "temperature": temperature, "seed": 3, "top_p": 0.95}
    together = generator.generate(PROMPTS, samples=4, **settings)  # type: ignore[arg-type]
    apart = generator.generate([p for p in PROMPTS for _ in range(4)], **settings)  # type: ignore[arg-type]
    assert [c.tokens for c in together] == [c.tokens for c in apart]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in apart]
    for ours, theirs in zip(together, apart, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    if temperature:
        assert len({tuple(c.tokens) for c in together[:4]}) > 1, "branches differ"


def test_one_sample_and_one_token() -> None:
    generator = Generator(_model(), None)
    one = generator.generate(PROMPTS, samples=1, max_new_tokens=5, temperature=0.0)
    assert one == generator.generate(PROMPTS, max_new_tokens=5, temperature=0.0)
    assert [len(c.tokens) for c in generator.generate(PROMPTS, samples=3, max_new_tokens=1)] == [1] * 9


def test_the_prompt_is_stored_once() -> None:
    prompt, branches, new = 30, 8, 4
    tree = TreeKVCache(CONFIG, [prompt], branches, new, torch.float32, "cpu")
    rows = StaticKVCache(CONFIG, branches, prompt + new, torch.float32, "cpu")
    assert tree.keys.numel() * branches * (prompt + new) == rows.keys.numel() * (prompt + branches * new)


def test_rules_of_the_cache_are_valid_at_every_step() -> None:
    """Among the slots in use each token sees the prompt and its own branch, spelled out by slot numbers."""
    cache = TreeKVCache(CONFIG, [3, 1], 2, 4, torch.float32, "cpu")
    assert cache.mask(3, None)[0, 0].tolist() == torch.ones(3, 3).tril().bool().tolist()
    cache.advance_prompts()
    for step in range(4):
        mask = cache.mask(2, None)[:, 0]
        assert cache.positions(2).tolist() == [[3 + step] * 2, [1 + step] * 2]
        for row, prompt in enumerate((3, 1)):
            for branch in range(2):
                own = [prompt + 2 * t + branch for t in range(step + 1)]
                assert mask[row, branch].nonzero().flatten().tolist() == [*range(prompt), *own]
        near = cache.mask(2, 2)[0, 0, 0].nonzero().flatten().tolist()
        assert near == ([2, 3] if step == 0 else [3 + 2 * (step - 1), 3 + 2 * step])
        cache.advance_branches()


def test_mistakes() -> None:
    generator = Generator(_model(), None)
    with pytest.raises(ConfigError, match="samples=0 must be at least 1"):
        generator.generate(PROMPTS, max_new_tokens=2, samples=0)
    with pytest.raises(ConfigError, match=r"prompt 0 of 9 tokens and max_new_tokens=32 exceed model\.max_sequence=40"):
        generator.generate(PROMPTS, max_new_tokens=32, samples=2)
    assert len(generator.generate(PROMPTS, max_new_tokens=31, samples=5)) == 15, "slots may exceed max_sequence"
    assert generator.generate([], max_new_tokens=3, samples=2) == []
