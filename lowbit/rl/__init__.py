"""Reinforcement learning: tasks and rewards, rollouts, losses; an objective and a batch source for the one loop."""
