"""Pretraining, distillation and reinforcement learning as one piece of work, each handing its weights to the next."""
