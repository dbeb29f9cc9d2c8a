"""`lowbit generate`: text from a run's checkpoint, printed as it comes."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lowbit.errors import ConfigError

REPLACEMENT = "\ufffd"

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of a run, such as runs/pretrain, or of a Hugging Face model.", show_default=False
    ),
]
Checkpoint = Annotated[str, typer.Option(help="Which checkpoint: latest, or a path.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on from; - reads it from standard input.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the K likeliest tokens only.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that sum to P, 0 < P <= 1.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    num_samples: Annotated[int, typer.Option(min=1, help="How many texts.")] = 1,
    stream: Annotated[bool, typer.Option(help="Print while generating (one sample).")] = True,
    device: Device = "auto",
    checkpoint: Checkpoint = "latest",
) -> None:
    """Generate text with a trained model."""
    from lowbit.infer.embedded import EmbeddedSampler
    from lowbit.infer.requests import Request
    from lowbit.infer.sampling import SamplingConfig
    from lowbit.trainer.loaded import load_run
    from lowbit.trainer.memory import explain_out_of_memory

    with explain_out_of_memory(lambda: "out of memory: fewer --num-samples or --max-tokens, or --device cpu"):
        text = _text(prompt)
        loaded = load_run(run, checkpoint, device)
        tokenizer = loaded.tokenizer
        ids = [*tokenizer.begin, *tokenizer.encode(text)]
        longest = loaded.config.model.max_sequence
        if len(ids) >= longest:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, its separator included, and model.max_sequence={longest} leaves no "
                "room for another: shorten the prompt"
            )
        max_tokens = min(max_tokens, longest - len(ids))
        sampler = EmbeddedSampler(loaded.model, tokenizer.eot_id, share=True)
        sampling = SamplingConfig(temperature, top_k, top_p)
        request = Request(tuple(ids), key=0, max_new_tokens=max_tokens, samples=num_samples)
        if stream and num_samples == 1:
            tokens = sampler.stream(request, sampling, seed=seed)
            print(text, end="", flush=True)
            for piece in pieces(tokens, tokenizer.decode, ids):
                print(piece, end="", flush=True)
            print()
            return
        [completions] = sampler.sample([request], sampling, seed=seed)
        for number, completion in enumerate(completions, start=1):
            if num_samples > 1:
                print(f"--- sample {number} of {num_samples}")
            print(text + "".join(pieces(completion.tokens, tokenizer.decode, ids)))


def _text(prompt: str) -> str:
    """The prompt's text, from standard input when it is "-". Raises ConfigError when it is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
        return data.decode("utf-8")
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 ({error}): convert it, for example with iconv") from None


def pieces(tokens: Iterable[int], decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> Iterator[str]:
    """The text that a token stream adds to a prompt, piece by piece, whole characters only.

    A token may end in the middle of a character, which decodes to U+FFFD until the rest has come; such an end is held
    back. What is still open when the stream ends is given as it is. Decoded is never the whole text, only what is open
    behind the last piece given, together with that piece, because decoders may look at a token's neighbour (a leading
    space is dropped where nothing stands before it).
    """
    given = list(prompt)  # tokens of the last piece
    held: list[int] = []  # tokens after it
    for token in tokens:
        held.append(token)
        before, text = decode(given), decode(given + held)
        if len(text) > len(before) and not text.endswith(REPLACEMENT):
            yield text[len(before) :]
            given, held = held, []
    if rest := decode(given + held)[len(decode(given)) :]:
        yield rest
