"""Reinforcement-learning post-training of diffusion and flow-matching models: the work behind each stage."""
