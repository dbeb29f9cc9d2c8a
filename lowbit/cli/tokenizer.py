"""`lowbit tokenizer`: train the byte-level BPE of a configuration, and look at a tokenizer."""

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.settings import TAKES_SETTINGS, read, settings

app = typer.Typer(name="tokenizer", help="Train a tokenizer, and look at one.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None,
    settings("Settings as for `lowbit pretrain`, such as data.tokenizer.vocab_size=16384 data.tokenizer.path=my-bpe."),
]


@app.command("train", context_settings=TAKES_SETTINGS)
def train(overrides: Overrides = None) -> None:
    """Train a byte-level BPE on the training documents; an existing one is kept."""
    from lowbit.configs.schema import TokenizerKind
    from lowbit.data.dataset import prepare_tokenizer
    from lowbit.data.sources import list_source
    from lowbit.errors import ConfigError

    config = read(overrides).data
    if config.tokenizer.kind is not TokenizerKind.bpe:
        raise ConfigError(f"data.tokenizer.kind={config.tokenizer.kind} is not trained; set it to bpe")
    listings = [list_source(name, source) for name, source in config.sources.items()]
    tokenizer = prepare_tokenizer(config, listings, print)
    print(f"ready: {tokenizer.vocab_size:,} tokens, digest {tokenizer.digest[:12]}")


@app.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="A tokenizer.json, or a folder that holds one.")],
    text: Annotated[str | None, typer.Option(help="Text to split into tokens.")] = None,
    eot: Annotated[str | None, typer.Option(help="The token that separates documents.")] = None,
) -> None:
    """Show a tokenizer, and how it splits a text."""
    from lowbit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, eot)
    sizes = tokenizer.token_bytes()
    print(f"{path}: {tokenizer.vocab_size:,} tokens, digest {tokenizer.digest[:12]}")
    print(f"separator {tokenizer.eot!r} is id {tokenizer.eot_id}; the longest token has {sizes.max()} bytes")
    if text is None:
        return
    ids = tokenizer.encode(text)
    print(f"{len(ids)} tokens for {len(text.encode('utf-8'))} bytes")
    for i in ids:
        print(f"{i:>8} {tokenizer.decode_bytes([i])!r}")
