"""Writes golden_squinch.json with the independent coder: run once a format version, never to make a test pass."""

import json
from pathlib import Path

import numpy as np
from squinch_oracle import Oracle


def main() -> None:
    rng = np.random.default_rng(20)
    normal = rng.standard_normal(24).astype(np.float32)
    special = np.array([0, -0.0, 1, -1, 1e-30, -1e30, 0.5, 3, np.inf, 1, 2, 3, 4, 5, 6, 7, *[1e-9] * 8], np.float32)
    mixed = (rng.standard_normal(200) * 2.0 ** rng.uniform(-12, 3, 200)).astype(np.float32)
    oracles = {
        "squinch": Oracle("squinch"),
        "sq48": Oracle("sq48"),
        "sq48_fast": Oracle("sq48", search=False),
    }
    golden = {
        name: [{"values": x.tobytes().hex(), "message": oracle.encode(x).hex()} for x in (normal, special, mixed)]
        for name, oracle in oracles.items()
    }
    Path(__file__).with_name("golden_squinch.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
