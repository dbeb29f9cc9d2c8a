"""Generation against full recomputation: a forward over all tokens, for every new one."""

import dataclasses

import pytest
import torch
from torch import Tensor

from lowbit.configs.schema import ModelConfig
from lowbit.errors import ConfigError, DataError
from lowbit.infer.cache import StaticKVCache
from lowbit.infer.engine import Completion, Generator
from lowbit.infer.sampling import SamplingConfig, choose, uniform
from lowbit.models.layers import Linear
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer

CONFIG = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=40, init_std=0.2)
VOCAB = 60
PROMPTS = [[5, 9, 1, 33, 2], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [59, 0]]


def _model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config, VOCAB, dtype)
    model.init_weights(4)
    return model


@torch.no_grad()
def _logits(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits behind the last token, by a forward over all of them."""
    hidden = model(torch.tensor([tokens]))[:, -1]
    return lm_head_logits(hidden, model.head_weight, vocab_size=VOCAB, softcap=model.config.logit_softcap)


def _recomputed(
    model: Transformer, prompt: list[int], index: int, new: int, sampling: SamplingConfig, seed: int, stops: set[int]
) -> Completion:
    tokens, logprobs = list(prompt), []
    for _ in range(new):
        token, logprob = choose(_logits(model, tokens), sampling, [uniform(seed, index, len(tokens))])
        tokens.append(int(token))
        logprobs.append(float(logprob))
        if tokens[-1] in stops:
            return Completion(tokens[len(prompt) :], logprobs, "stop")
    return Completion(tokens[len(prompt) :], logprobs, "length")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_decoding_equals_the_full_forward(kv_heads: int) -> None:
    """Rows of different length, in pieces of different size, against a forward over each row alone."""
    model = _model(dataclasses.replace(CONFIG, kv_heads=kv_heads))
    cache = StaticKVCache(model.config, 4, 30, torch.float32, "cpu")
    rows: list[list[int]] = [[], [], [], []]
    torch.manual_seed(0)
    for width, counts in (
        (11, [5, 1, 11, 2]),
        (1, [1, 1, 1, 1]),
        (4, [4, 2, 3, 0]),
        (1, [1, 1, 1, 1]),
        (5, [5, 5, 5, 5]),
    ):
        feed = torch.randint(0, VOCAB, (4, width))
        with torch.no_grad():
            hidden = model(feed, cache=cache)
        for row, count in enumerate(counts):
            rows[row] += feed[row, :count].tolist()
            if count:
                with torch.no_grad():
                    expected = model(torch.tensor([rows[row]]))[0, -count:]
                torch.testing.assert_close(hidden[row, :count], expected, rtol=1e-4, atol=1e-4)
        cache.advance(counts)
        assert cache.lengths.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(0.0), SamplingConfig(), SamplingConfig(0.7, top_k=5), SamplingConfig(1.3, top_p=0.8)]
)
def test_generation_equals_recomputation(softcap: float | None, sampling: SamplingConfig) -> None:
    model = _model(dataclasses.replace(CONFIG, logit_softcap=softcap))
    got = Generator(model, eot_id=0).generate(
        PROMPTS,
        max_new_tokens=20,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=3,
        stop_ids=[1],
    )
    for index, (completion, prompt) in enumerate(zip(got, PROMPTS, strict=True)):
        expected = _recomputed(model, prompt, index, 20, sampling, 3, {0, 1})
        assert completion.tokens == expected.tokens
        assert completion.finish_reason == expected.finish_reason
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_greedy_is_the_argmax_of_the_full_forward() -> None:
    model = _model()
    [completion] = Generator(model, None).generate([PROMPTS[0]], max_new_tokens=12, temperature=0.0)
    assert len(completion.tokens) == 12 and completion.finish_reason == "length"
    for step, token in enumerate(completion.tokens):
        assert token == int(_logits(model, PROMPTS[0] + completion.tokens[:step]).argmax())


def test_a_stop_ends_one_row_and_is_part_of_it() -> None:
    model = _model()
    free = Generator(model, None).generate(PROMPTS, max_new_tokens=15, seed=1)
    stop = free[2].tokens[6]
    stopped = Generator(model, stop).generate(PROMPTS, max_new_tokens=15, seed=1)
    for before, after in zip(free, stopped, strict=True):
        if stop in before.tokens:
            cut = before.tokens.index(stop) + 1
            assert after.tokens == before.tokens[:cut] and len(after.logprobs) == cut
            assert after.finish_reason == "stop"
        else:
            assert after == before
    assert stopped[2].finish_reason == "stop"
    assert stopped == Generator(model, None).generate(PROMPTS, max_new_tokens=15, seed=1, stop_ids=[stop])


def test_batch_mates_do_not_matter() -> None:
    generator = Generator(_model(), None)
    alone = generator.generate(PROMPTS[:1], max_new_tokens=15, seed=9)[0].tokens
    for mates in (PROMPTS[1:], PROMPTS[2:3], [PROMPTS[0]] * 3):
        assert generator.generate([PROMPTS[0], *mates], max_new_tokens=15, seed=9)[0].tokens == alone
    twice = generator.generate([PROMPTS[0], PROMPTS[0]], max_new_tokens=15, seed=9)
    assert twice[0].tokens != twice[1].tokens, "two samples of one prompt need noise of their own"
    assert generator.generate(PROMPTS[:1], max_new_tokens=15, seed=10)[0].tokens != alone


def test_streaming_gives_the_same_tokens_one_by_one() -> None:
    generator = Generator(_model(), eot_id=0)
    [expected] = generator.generate([PROMPTS[3]], max_new_tokens=25, temperature=1.5, seed=2)
    stream = generator.stream(PROMPTS[3], max_new_tokens=25, temperature=1.5, seed=2)
    assert next(stream) == expected.tokens[0]
    assert [expected.tokens[0], *stream] == expected.tokens


def test_weights_are_free_again_afterwards() -> None:
    model = _model(dtype=torch.bfloat16)
    generator = Generator(model, None)
    first = generator.generate(PROMPTS, max_new_tokens=3)
    stream = generator.stream([1, 2], max_new_tokens=9)
    next(stream)
    del stream
    assert all(module.frozen is None for module in model.modules() if isinstance(module, Linear))
    model.init_weights(5)
    assert generator.generate(PROMPTS, max_new_tokens=3) != first


def test_padded_vocabulary_is_never_generated() -> None:
    model = _model()
    with torch.no_grad():
        model.head_weight[VOCAB:] = 100 * model.head_weight[:4]
    for completion in Generator(model, None).generate(PROMPTS, max_new_tokens=20, temperature=5.0):
        assert all(0 <= token < VOCAB for token in completion.tokens)


def test_the_longest_sequence_fits_exactly() -> None:
    generator = Generator(_model(), None)
    assert len(generator.generate([[3] * 30], max_new_tokens=10)[0].tokens) == 10
    with pytest.raises(ConfigError, match=r"31 tokens and max_new_tokens=10 exceed model\.max_sequence=40"):
        generator.generate([[3] * 31], max_new_tokens=10)


def test_bad_requests() -> None:
    generator = Generator(_model(), None)
    assert generator.generate([], max_new_tokens=3) == []
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generator.generate([[1], []], max_new_tokens=3)
    for token in (-1, VOCAB):
        with pytest.raises(DataError, match=f"prompt 0 has id {token} at position 1"):
            generator.generate([[1, token]], max_new_tokens=3)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        generator.generate([[1]], max_new_tokens=0)
    with pytest.raises(ConfigError, match="temperature"):
        generator.generate([[1]], max_new_tokens=3, temperature=-1.0)
    with pytest.raises(ConfigError, match="top_p"):
        generator.stream([1], max_new_tokens=3, top_p=0.0)
    with pytest.raises(DataError, match="empty"):
        generator.stream([], max_new_tokens=3)


def test_cache_limits() -> None:
    with pytest.raises(ConfigError, match="max_sequence=40"):
        StaticKVCache(CONFIG, 1, 41, torch.float32, "cpu")
    cache = StaticKVCache(CONFIG, 2, 8, torch.float32, "cpu")
    cache.advance([7, 3])
    assert cache.extent(1) == 8
    with pytest.raises(ConfigError, match="7 are stored, 2 more"):
        cache.extent(2)
    uneven = StaticKVCache(CONFIG, 2, 8, torch.float32, "cpu")
    uneven.advance([3, 1])
    uneven.advance([1, 4])
    assert uneven.extent(3) == 8 and uneven.lengths.tolist() == [4, 5]
    with pytest.raises(ConfigError, match="1 counts for 2 rows"):
        cache.advance([1])
