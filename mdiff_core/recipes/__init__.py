"""Recipes: one module per (model, algorithm, reward), each with one `RECIPE` dict for RunConfig and a docstring saying where its numbers come from."""
