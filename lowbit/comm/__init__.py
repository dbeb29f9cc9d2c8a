"""Gradients between processes in few bits: block codecs, the two-hop collective that carries them, what they cost."""
