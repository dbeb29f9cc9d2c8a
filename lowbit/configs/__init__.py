"""Configuration: typed schema, presets, and the strict merge."""
