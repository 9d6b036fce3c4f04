"""Recipes: one module per (model, algorithm, reward), each with a RunConfig, `RECIPE`, and where its numbers come from."""
