"""The engine against full recomputation: a forward over all tokens, for every new one."""

import random
import threading

import pytest
import torch
from sampler_oracle import LAYOUTS, VOCAB, logits_of, logprobs_of, model_of, recomputed, transformers_twin

from lowbit.errors import ConfigError, DataError, NonFiniteError
from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.kv_codec import KvFormat
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import SamplingConfig, sampling_logprobs
from lowbit.models.layers import weights_and_state

PROMPTS = [[5, 9, 1, 33, 2], [7], list(range(11, 22)), [59, 0], [5, 9, 1, 33, 2, 8, 8]]
SAMPLINGS = [SamplingConfig(0.0), SamplingConfig(), SamplingConfig(0.7, top_k=5), SamplingConfig(1.3, top_p=0.8)]


def _requests(samples: int = 2, new: int = 18) -> list[Request]:
    return [Request(tuple(p), 100 + i, new - i, samples, i) for i, p in enumerate(PROMPTS)]


def _random_requests(seed: int, count: int = 9, longest: int = 48) -> list[Request]:
    """Prompts and answers of every length, some with a common beginning."""
    pick = random.Random(seed)
    begin = tuple(pick.randrange(VOCAB) for _ in range(17))
    requests = []
    for key in range(count):
        common = begin[: pick.choice([0, 3, 8, 16, 17])]
        prompt = common + tuple(pick.randrange(VOCAB) for _ in range(pick.randrange(1, 14)))
        requests.append(Request(prompt, key, pick.randrange(1, longest - len(prompt) + 1), pick.randrange(1, 6)))
    return requests


def _close(ours: list[list[Sample]], theirs: list[list[Sample]]) -> None:
    for group, expected in zip(ours, theirs, strict=True):
        for a, b in zip(group, expected, strict=True):
            assert (a.tokens, a.finish_reason, a.versions) == (b.tokens, b.finish_reason, b.versions)
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


@pytest.mark.parametrize(
    ("layout", "sampling"),
    [*((layout, SamplingConfig()) for layout in LAYOUTS), *(("plain", sampling) for sampling in SAMPLINGS)],
    ids=str,
)
def test_samples_are_those_of_recomputation(layout: str, sampling: SamplingConfig) -> None:
    """Fewer slots than rows, prompts of several blocks and of one token, stops, first tokens drawn apart."""
    model = model_of(**LAYOUTS[layout])
    engine = EmbeddedSampler(model, 0, slots=4, block=4)
    requests = _requests()
    got = engine.sample(requests, sampling, seed=3, stop_ids=[1])
    _close(
        got,
        [[recomputed(model, r, r.first_sample + i, sampling, 3, {0, 1}) for i in range(r.samples)] for r in requests],
    )


@pytest.mark.parametrize(("block", "slots", "prefill"), [(1, 1, 4096), (4, 3, 1), (16, 3, 7), (64, 64, 30)])
def test_slots_blocks_and_pieces_do_not_matter(block: int, slots: int, prefill: int) -> None:
    model, requests = model_of(), _random_requests(1, 4, 36)
    engine = EmbeddedSampler(model, 7, slots=slots, block=block, prefill_tokens=prefill)
    expected = EmbeddedSampler(model, 7, slots=16).sample(requests, SamplingConfig(), seed=1)
    for _ in range(2):  # the second time most prompts are known
        _close(engine.sample(requests, SamplingConfig(), seed=1), expected)
    assert engine.prefix_hits > 0 or block == 64


@pytest.mark.parametrize("seed", range(2))
def test_deterministic_results_are_the_same_bit_for_bit(seed: int) -> None:
    """Whatever the order, the batch mates, and what is in the prefix cache."""
    model = model_of(width=104, mlp_width=200)
    pick = random.Random(seed)
    requests, first = _random_requests(seed), {}
    engine = EmbeddedSampler(model, 3, slots=5, block=8, deterministic=True)
    for trial in range(5):
        some = requests if trial == 0 else pick.sample(requests, pick.randrange(1, len(requests)))
        if trial == 3:
            engine = EmbeddedSampler(model, 3, slots=16, block=8, deterministic=True)
        for request, group in zip(some, engine.sample(some, SamplingConfig(), seed=5), strict=True):
            assert first.setdefault(request.key, group) == group


def test_one_sampler_of_a_group_is_the_group_sampled_in_parts() -> None:
    model = model_of()
    engine = EmbeddedSampler(model, None, slots=4)
    whole = engine.sample([Request((1, 2, 3), 8, 12, 6)], SamplingConfig(), seed=2)[0]
    parts = engine.sample(
        [Request((1, 2, 3), 8, 12, 2, 4), Request((1, 2, 3), 8, 12, 3), Request((1, 2, 3), 8, 12, 1, 3)],
        SamplingConfig(),
        seed=2,
    )
    _close([[*parts[1], *parts[2], *parts[0]]], [whole])
    assert len({sample.tokens[0] for sample in whole}) > 1, "first tokens are drawn one by one"
    assert engine.sample([Request((1, 2, 3), 9, 12, 6)], SamplingConfig(), seed=2)[0] != whole
    assert engine.sample([Request((1, 2, 3), 8, 12, 6)], SamplingConfig(), seed=3)[0] != whole


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logprobs_are_those_of_one_forward(sampling: SamplingConfig) -> None:
    """The target of issue and trainer: less than 2e-5 apart in FP32."""
    model, requests = model_of(), _random_requests(3)
    got = EmbeddedSampler(model, 0, slots=8).sample(requests, sampling, seed=1)
    for request, group in zip(requests, got, strict=True):
        for sample in group:
            theirs = logprobs_of(model, request, sample, sampling)
            assert (torch.tensor(sample.logprobs) - theirs).abs().max() < 2e-5


def test_tokens_and_logprobs_are_those_of_transformers() -> None:
    """Greedy tokens of its own `generate`, and log-probabilities by its forward in FP64."""
    model = model_of(qk_norm=True, init_std=0.3)
    theirs = transformers_twin(model)
    requests = [Request(tuple(prompt), i, 12) for i, prompt in enumerate(PROMPTS)]
    for request, [sample] in zip(
        requests, EmbeddedSampler(model, None, slots=3).sample(requests, SamplingConfig(0.0), seed=1), strict=True
    ):
        prompt = torch.tensor([request.prompt])
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert out[0, prompt.shape[1] :].tolist() == sample.tokens
    theirs.double()
    for request, [sample] in zip(
        requests, EmbeddedSampler(model, None).sample(requests, SamplingConfig(0.8), seed=1), strict=True
    ):
        with torch.no_grad():
            logits = theirs(torch.tensor([[*request.prompt, *sample.tokens]])).logits[0, len(request.prompt) - 1 : -1]
        logprobs = (logits[:, :VOCAB] / 0.8).log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert (torch.tensor(sample.logprobs) - logprobs).abs().max() < 2e-5


def test_frequencies_are_those_of_the_exact_distribution() -> None:
    """Chi-square over all continuations of two tokens, against their exact probabilities."""
    model, n = model_of(init_std=0.5), 6000
    sampling = SamplingConfig(0.9, top_k=6)
    got = EmbeddedSampler(model, None, slots=500).sample([Request((4, 2), 1, 2, n)], sampling, seed=6)[0]
    first = sampling_logprobs(logits_of(model, [4, 2])[-1:], sampling)[0]
    expected: dict[tuple[int, int], float] = {}
    for a in first.isfinite().nonzero()[:, 0].tolist():
        second = sampling_logprobs(logits_of(model, [4, 2, a])[-1:], sampling)[0]
        expected |= {(a, b): float((first[a] + second[b]).exp()) for b in second.isfinite().nonzero()[:, 0].tolist()}
    counts = dict.fromkeys(expected, 0)
    for sample in got:
        counts[sample.tokens[0], sample.tokens[1]] += 1  # a KeyError is a pair without probability
    likely = [pair for pair, p in expected.items() if p * n >= 5]
    rest = 1 - sum(expected[pair] for pair in likely)
    chi = sum((counts[p] - n * expected[p]) ** 2 / (n * expected[p]) for p in likely)
    chi += (n - sum(counts[p] for p in likely) - n * rest) ** 2 / (n * rest)
    assert chi < len(likely) + 4 * (2 * len(likely)) ** 0.5, f"{chi} with {len(likely)} degrees of freedom"


def test_stops() -> None:
    """Several stop ids, each of which ends a row and is part of it; one-token completions; a stop as first token."""
    model, requests = model_of(), _requests(samples=3, new=25)
    free = EmbeddedSampler(model, None).sample(requests, SamplingConfig(), seed=1)
    stops = {free[2][0].tokens[6], free[0][1].tokens[0], free[1][2].tokens[3]}
    one, *others = stops
    ended = EmbeddedSampler(model, one, slots=3).sample(requests, SamplingConfig(), seed=1, stop_ids=others)
    lengths = set()
    for before, after in zip([s for g in free for s in g], [s for g in ended for s in g], strict=True):
        cut = next((i + 1 for i, token in enumerate(before.tokens) if token in stops), None)
        assert after.tokens == before.tokens[:cut] and len(after.logprobs) == len(after.versions) == len(after.tokens)
        assert after.finish_reason == ("length" if cut is None else "stop")
        lengths.add(len(after.tokens))
    assert 1 in lengths
    ones = EmbeddedSampler(model, None, slots=2).sample(
        [Request((3, 4), i, 1, 3) for i in range(4)], SamplingConfig(), seed=1
    )
    assert all(len(s.tokens) == 1 and s.finish_reason == "length" for group in ones for s in group)


def test_a_slot_that_is_free_is_taken_at_once() -> None:
    """One long row and many short ones in two slots: as many steps as the long one needs."""
    engine = EmbeddedSampler(model_of(), None, slots=2)
    requests = [Request((1,), 0, 30), *(Request((2,), i, 5) for i in range(1, 7))]
    sizes = []
    real = EmbeddedSampler._step

    def step(self: EmbeddedSampler, sampling: SamplingConfig) -> object:
        sizes.append(len(self._state.rows))
        return real(self, sampling)

    engine._step = step.__get__(engine)  # type: ignore[method-assign]
    engine.sample(requests, SamplingConfig(), seed=1)
    assert len(sizes) == 29, "the first token comes with the prompt"
    assert sizes == [2] * 24 + [1] * 5


@pytest.mark.parametrize("steps", [1, 2])
def test_a_host_that_is_behind_sees_the_same(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step is launched before the tokens of the last one are known, so rows run on after their end."""
    model, requests = model_of(), _random_requests(4)
    settings = {"slots": 4, "block": 4}
    expected = EmbeddedSampler(model, 7, **settings).sample(requests, SamplingConfig(), seed=1, stop_ids=[8, 9])  # type: ignore[arg-type]
    monkeypatch.setattr(EmbeddedSampler, "_lag", steps)
    engine = EmbeddedSampler(model, 7, **settings)  # type: ignore[arg-type]
    for _ in range(2):
        _close(engine.sample(requests, SamplingConfig(), seed=1, stop_ids=[8, 9]), expected)
        assert engine._pool.available == engine._pool.blocks - 1, "no block is lost"
    [[one]] = engine.sample([Request((1, 2), 0, 1)], SamplingConfig(), seed=1)
    assert len(one.tokens) == 1


def test_prompts_are_read_once_for_a_group() -> None:
    model = model_of()
    engine = EmbeddedSampler(model, None, slots=3, block=4)
    read = []
    real = engine.model.forward

    def forward(tokens: torch.Tensor, **settings: object) -> torch.Tensor:
        read.append(tuple(tokens.shape))
        return real(tokens, **settings)  # type: ignore[arg-type]

    engine.model.forward = forward  # type: ignore[method-assign]
    engine.sample([Request(tuple(range(10)), 0, 4, 9)], SamplingConfig(), seed=1)
    assert [shape for shape in read if shape[1] > 1] == [(1, 10)]


def test_conversations_keep_their_prefix_and_new_weights_forget_it() -> None:
    model = model_of()
    engine = EmbeddedSampler(model, None, slots=4, block=4)
    prompt = tuple(range(1, 12))
    first = engine.sample([Request(prompt, 0, 9)], SamplingConfig(), seed=1)[0][0]
    assert engine.prefix_hits == 0
    turn = Request((*prompt, *first.tokens, 33, 34), 0, 8)
    second = engine.sample([turn], SamplingConfig(), seed=1)[0][0]
    assert engine.prefix_hits == 16, "four blocks of 11 + 9 tokens, of whose last one the keys are not known"
    _close([[second]], [[recomputed(model, turn, 0, SamplingConfig(), 1, set())]])
    other = model_of(seed=5)
    engine.update(weights_and_state(other).items(), 1)
    again = engine.sample([turn], SamplingConfig(), seed=1)[0][0]
    assert engine.prefix_hits == 16
    expected = recomputed(other, turn, 0, SamplingConfig(), 1, set())
    assert again.tokens == expected.tokens and again.versions == [1] * 8
    assert again.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


@pytest.mark.parametrize("kv", [KvFormat.int8, KvFormat.fp8, KvFormat.bf16])
def test_few_bits_of_keys_and_values(kv: KvFormat) -> None:
    """Close to the exact engine, the same whether a prompt's keys were found or made, and not the exact thing."""
    model, requests = model_of(), _random_requests(2)
    engine = EmbeddedSampler(model, None, slots=8, block=4, kv=kv)
    got = engine.sample(requests, SamplingConfig(), seed=1)
    _close(engine.sample(requests, SamplingConfig(), seed=1), got)
    assert engine.prefix_hits > 0
    apart = torch.cat(
        [
            torch.tensor(sample.logprobs) - logprobs_of(model, request, sample, SamplingConfig())
            for request, group in zip(requests, got, strict=True)
            for sample in group
        ]
    )
    bound = {KvFormat.int8: 0.03, KvFormat.fp8: 0.15, KvFormat.bf16: 0.02}[kv]
    assert 0 < apart.square().mean().sqrt() < bound


def test_streams() -> None:
    engine = EmbeddedSampler(model_of(), 0, slots=4)
    request = Request((59, 0), 3, 25)
    [[expected]] = engine.sample([request], SamplingConfig(1.5), seed=2)
    stream = engine.stream(request, SamplingConfig(1.5), seed=2)
    assert next(stream) == expected.tokens[0]
    with pytest.raises(ConfigError, match="running already"):
        engine.sample([request], SamplingConfig(), seed=1)
    assert [expected.tokens[0], *stream] == expected.tokens
    broken_off = engine.stream(request, SamplingConfig(), seed=2)
    next(broken_off)
    broken_off.close()
    free = engine._pool.available
    assert engine.sample([request], SamplingConfig(1.5), seed=2) == [[expected]]
    assert engine._pool.available == free == engine._pool.blocks - 1, "no block is lost"


def test_new_weights_between_two_steps() -> None:
    """From another thread, as an asynchronous trainer sends them: every token says with which it was drawn."""
    old, new = model_of(), model_of(seed=5)
    engine = EmbeddedSampler(old, None, slots=4, block=4)
    request = Request((1, 2, 3), 0, 30)
    stream = engine._run(engine._groups([request], 1), SamplingConfig(), 1, ())
    row = next(stream)[0]
    for _ in range(6):
        next(stream)
    sender = threading.Thread(target=lambda: engine.update(weights_and_state(new).items(), 7))
    sender.start()
    sender.join()
    for _ in stream:
        pass
    assert row.versions == [0] * 7 + [7] * 23
    assert engine._pool.match([1, 2, 3, *row.tokens], 7) == [], "keys of two versions are nobody's prefix"


def test_the_model_is_not_touched() -> None:
    model = model_of(dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in weights_and_state(model).items()}
    engine = EmbeddedSampler(model, None)
    engine.sample(_requests(), SamplingConfig(), seed=1)
    other = weights_and_state(model_of(dtype=torch.bfloat16, seed=6))
    engine.update(other.items(), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_and_state(model).items())
    assert all(getattr(module, "frozen", None) is None for module in model.modules())
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_padded_vocabulary_is_never_generated() -> None:
    model = model_of()
    with torch.no_grad():
        model.head_weight[VOCAB:] = 100 * model.head_weight[:4]
    for group in EmbeddedSampler(model, None).sample(_requests(), SamplingConfig(5.0), seed=1):
        assert all(0 <= token < VOCAB for sample in group for token in sample.tokens)


def test_the_longest_sequence_fits_exactly() -> None:
    engine = EmbeddedSampler(model_of(), None, block=5)
    assert len(engine.sample([Request((3,) * 38, 0, 10)], SamplingConfig(), seed=0)[0][0].tokens) == 10
    with pytest.raises(ConfigError, match=r"39 tokens and max_new_tokens=10 exceed model\.max_sequence=48"):
        engine.sample([Request((3,) * 39, 0, 10)], SamplingConfig(), seed=0)


def test_mistakes() -> None:
    engine = EmbeddedSampler(model_of(), None)
    plain = SamplingConfig()
    assert engine.sample([], plain, seed=1) == []
    with pytest.raises(DataError, match="prompt 1 is empty"):
        engine.sample([Request((1,), 0, 3), Request((), 1, 3)], plain, seed=1)
    for token in (-1, VOCAB):
        with pytest.raises(DataError, match=f"prompt 0 has id {token} at position 1"):
            engine.sample([Request((1, token), 0, 3)], plain, seed=1)
    for request, text in (
        (Request((1,), 0, 0), "max_new_tokens=0"),
        (Request((1,), 0, 3, 0), "samples=0"),
        (Request((1,), -1, 3), "key=-1"),
        (Request((1,), 0, 3, 1, -1), "first_sample=-1"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.stream(request, plain, seed=1)
    with pytest.raises(ConfigError, match="seed=-1"):
        engine.sample([Request((1,), 0, 3)], plain, seed=-1)
    with pytest.raises(ConfigError, match="slots=0"):
        EmbeddedSampler(model_of(), None, slots=0)
    with pytest.raises(ConfigError, match="block=0: choose at least 1"):
        EmbeddedSampler(model_of(), None, block=0)


def test_logits_that_are_not_finite_are_named() -> None:
    engine = EmbeddedSampler(model_of(), None)
    with torch.no_grad():
        engine.model.final_norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match="token 3 of prompt key 5"):
        engine.sample([Request((1, 2, 3), 5, 4)], SamplingConfig(), seed=1)
    with torch.no_grad():
        engine.model.final_norm.weight[3] = 1.0
    assert len(engine.sample([Request((1, 2, 3), 5, 4)], SamplingConfig(), seed=1)[0][0].tokens) == 4
