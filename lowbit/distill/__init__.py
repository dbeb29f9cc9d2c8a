"""Distillation from a stored teacher: targets sampled once, kept in a few bytes each, for any number of students."""
