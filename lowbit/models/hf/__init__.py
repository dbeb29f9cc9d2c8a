"""Checkpoints in and out of Hugging Face folders: config.json, safetensors with an index, tokenizer.

Stock architectures only, so that their readers need no code of ours; safetensors only, so that reading runs no code
of theirs.
"""
