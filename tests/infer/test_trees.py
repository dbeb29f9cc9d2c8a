"""A tree of samples: branches share what is stored of their trunk, and say what one pass over the tree would."""

import pytest
import torch
from sampler_oracle import LAYOUTS, logits_of, model_of, recomputed

from lowbit.infer.embedded import EmbeddedSampler
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import SamplingConfig
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer
from lowbit.models.visibility import Visibility

ROOT = (3, 1, 4, 1, 5, 9, 2, 6)
"""Two blocks of four."""
CHILDREN, GRANDCHILDREN, NEW = 3, 2, 8


def grown(engine: EmbeddedSampler) -> tuple[list[Sample], list[list[Sample]], list[Request]]:
    """Branches of the root, and branches of each of them, which were told another token each."""
    [children] = engine.sample([Request(ROOT, 0, NEW, CHILDREN)], SamplingConfig(), seed=1)
    turns = [
        Request((*ROOT, *child.tokens, 50 + i), 0, NEW, GRANDCHILDREN, 10 * (i + 1)) for i, child in enumerate(children)
    ]
    return children, engine.sample(turns, SamplingConfig(), seed=1), turns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_branches_share_their_trunk(layout: str) -> None:
    """Of 17 tokens before a branch of the second kind four blocks are found; every sample is the recomputed one."""
    model = model_of(**LAYOUTS[layout])
    engine = EmbeddedSampler(model, None, slots=4, block=4)
    _, grandchildren, turns = grown(engine)
    known = (len(ROOT) + NEW - 1) // 4 * 4  # of a branch's last token there are no keys
    assert engine.prefix_hits == CHILDREN * known
    for turn, group in zip(turns, grandchildren, strict=True):
        for offset, sample in enumerate(group):
            expected = recomputed(model, turn, turn.first_sample + offset, SamplingConfig(), 1, set())
            assert sample.tokens == expected.tokens
            assert max(abs(a - b) for a, b in zip(sample.logprobs, expected.logprobs, strict=True)) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_they_are_those_of_one_pass_under_the_visibility_rule(layout: str) -> None:
    """All branches in one row, each seen by its own descendants: 8 + 3 (9 + 2 x 8) tokens, none of them twice."""
    model: Transformer = model_of(max_sequence=96, **LAYOUTS[layout])
    engine = EmbeddedSampler(model, None, slots=4, block=4)
    children, grandchildren, turns = grown(engine)
    tokens, limit, depth = list(ROOT), [0] * len(ROOT), list(range(len(ROOT)))
    wanted: list[tuple[int, int, float]] = []  # place of the token before, the token, its log-probability

    def add(trunk: int, ids: list[int], drawn: Sample) -> list[int]:
        """Append a branch behind the token at `trunk`; its places."""
        places, before, logprobs = [], trunk, iter(drawn.logprobs)
        for token, is_drawn in [(t, True) for t in drawn.tokens] + [(t, False) for t in ids]:
            if is_drawn:
                wanted.append((before, token, next(logprobs)))
            tokens.append(token)
            depth.append(depth[before] + 1)
            limit.append(0)
            before = len(tokens) - 1
            places.append(before)
        return places

    for child, turn, group in zip(children, turns, grandchildren, strict=True):
        places = add(len(ROOT) - 1, [turn.prompt[-1]], child)
        for sample in group:
            for place in add(places[-1], [], sample):
                limit[place] = len(tokens)
        for place in places:
            limit[place] = len(tokens)
    limit[: len(ROOT)] = [len(tokens)] * len(ROOT)
    rule = Visibility(*(torch.tensor([row], dtype=torch.int32) for row in (list(range(len(tokens))), limit, depth)))
    rule.validate(tree=True)
    hidden = model(torch.tensor([tokens]), rule)[0]
    logits = lm_head_logits(
        hidden.float(), model.head_weight, vocab_size=model.vocab_size, softcap=model.config.logit_softcap
    )
    found = logits.log_softmax(-1)
    assert len(wanted) == CHILDREN * NEW * (1 + GRANDCHILDREN)
    for before, token, logprob in wanted:
        assert abs(found[before, token].item() - logprob) < 2e-5
    plain = logits_of(model, tokens).log_softmax(-1)
    assert any(abs(plain[before, token].item() - logprob) > 1e-2 for before, token, logprob in wanted), (
        "the rule matters"
    )
