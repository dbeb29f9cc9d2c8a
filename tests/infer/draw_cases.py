"""The drawing kernels against `sampling.choose`, which defines them.

`python draw_cases.py` runs them in Triton's interpreter (TRITON_INTERPRET=1), where there is no GPU.
"""

import torch
from attention_cases import mend_interpreter
from torch import Tensor

from lowbit.infer.kernels.draw import draw
from lowbit.infer.sampling import SamplingConfig, choose

VOCABS = (1, 7, 256, 257, 2048, 5000)


def noise_of(rows: int) -> Tensor:
    """Both ends among them."""
    noise = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    noise[0], noise[-1] = 0.0, 1 - 2**-53
    return noise


def compare(vocab: int, temperature: float, device: str) -> None:
    """Spread logits, ties, tokens that are ruled out, a row that knows what it wants."""
    rows = 12
    logits = 4 * torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(1))[:, :vocab]
    logits[1] = 0.5
    if vocab > 3:
        logits[2:4, : vocab - 2] = float("-inf")
        logits[4, vocab // 2] = 80.0
    noise = noise_of(rows)
    token, logprob = choose(logits, SamplingConfig(temperature), noise)
    values = draw(logits.to(device), noise.to(device), temperature).cpu()
    assert torch.equal(values[:, 0].long(), token), (vocab, temperature)
    torch.testing.assert_close(values[:, 1].float(), logprob, rtol=2e-6, atol=2e-6)


def broken(device: str) -> None:
    """What is not a number shows in the row that has it, and there only."""
    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(3, 3000)
        logits[1, 2500] = bad
        values = draw(logits.to(device), torch.full((3,), 0.3, dtype=torch.float64, device=device), 1.0).cpu()
        assert values[:, 1].isnan().tolist() == [False, True, False]
        if bad != bad:  # alone in its part of a row
            logits = torch.zeros(2, 2049)
            logits[1, 2048] = bad
            values = draw(logits.to(device), torch.full((2,), 0.3, dtype=torch.float64, device=device), 1.0).cpu()
            assert values[:, 1].isnan().tolist() == [False, True]


def all_cases(device: str) -> None:
    for vocab in VOCABS:
        for temperature in (1.0, 0.6, 1e-30):
            compare(vocab, temperature, device)
    broken(device)


if __name__ == "__main__":
    mend_interpreter()
    all_cases("cpu")
    print("drawn")
