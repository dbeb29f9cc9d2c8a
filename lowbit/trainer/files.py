"""Names of the files in a run's folder that one part writes and others read, each written down once.

This module imports nothing: the command line, which answers before PyTorch is loaded, has them from here too.
"""

CONFIG = "config.yaml"
"""Everything that was set."""
RUN_LOG = "run.log"
"""What the run said."""
METRICS = "metrics.jsonl"
"""A row of numbers for each logged step."""
SAMPLES = "samples.jsonl"
"""Generated texts."""
PRECISION = "precision.json"
"""What each layer got, from the start and after each switch."""
OUTCOME = "outcome.json"
"""In each job's folder of a sweep: how the job ended."""
LOCK = "lock"
"""Held by the process that has the folder."""
