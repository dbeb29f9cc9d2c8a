"""`lowbit data`: pack the sources of a configuration, and look into what was packed."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.settings import TAKES_SETTINGS, read, settings

app = typer.Typer(name="data", help="Pack documents into shards, and inspect packed shards.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None,
    settings("Settings as for `lowbit pretrain`, such as data=files data.sources.files.path=corpus/."),
]


@app.command("pack", context_settings=TAKES_SETTINGS)
def pack(overrides: Overrides = None) -> None:
    """Tokenize and pack the data of a run now; `lowbit pretrain` with the same settings then starts at once."""
    from lowbit.data.dataset import prepare_data

    dataset = prepare_data(read(overrides).data, print)
    print(f"ready: {dataset.train_tokens:,} training and {dataset.val_tokens:,} held-out tokens")
    for source in dataset.sources:
        print(f"  {source.name}: {source.share:.1%} of samples, {source.sequences:,} sequences an epoch")
    print(f"next: lowbit pretrain {shlex.join(overrides or [])}".rstrip())


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(help="A packed folder, or a folder that holds some (data/).")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its SHA-256.")] = False,
) -> None:
    """Show what packed folders hold."""
    from lowbit.data.conversations import MANIFEST as TREES
    from lowbit.data.conversations import open_trees
    from lowbit.data.shards import MANIFEST, open_packed
    from lowbit.errors import DataError

    folders = sorted(p.parent for p in path.rglob(MANIFEST)) if path.is_dir() else []
    conversations = sorted(p.parent for p in path.rglob(TREES)) if path.is_dir() else []
    if not folders and not conversations:
        raise DataError(
            f"no packed data in {path}: give a packed folder or data.cache_dir (or pack with lowbit data pack)"
        )
    for folder in folders:
        packed = open_packed(folder, verify=verify)
        _print(folder, packed.manifest)
        if verify:
            print("  verified     every file matches its SHA-256")
    for folder in conversations:
        trees = open_trees(folder)
        print(f"{folder}\n  source       conversations\n  content      {trees.digest[:12]}")
        for split, rows in (("train", trees.train), ("val", trees.val)):
            print(f"  {split:12} {rows.rows:,} rows, {len(rows):,} tokens, {rows.text_bytes:,} bytes")
        print("  verified     every file matches its SHA-256")


def _print(folder: Path, manifest: dict[str, Any]) -> None:
    source, shape = manifest["source"], manifest["settings"]
    print(folder)
    print(f"  source       {source['kind']}, {source['files']:,} files, listing {source['listing_sha256'][:12]}")
    print(f"  tokenizer    {manifest['vocab_size']:,} tokens, digest {manifest['tokenizer_digest'][:12]}")
    print(f"  content      {manifest['content_sha256'][:12]}, stored in {manifest['dtype'][-1]} bytes a token")
    print(f"  settings     held_out={shape['held_out']} shard_tokens={shape['shard_tokens']:,}")
    print(f"  versions     {' '.join(f'{k} {v}' for k, v in manifest['versions'].items())}")
    for split in ("train", "val"):
        part = manifest[split]
        ratio = part["bytes"] / max(1, part["tokens"] - part["documents"])
        print(
            f"  {split:12} {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes "
            f"({ratio:.2f} a token), {len(part['shards'])} shards"
        )
