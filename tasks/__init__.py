"""The stages as Flyte tasks. What must be in the environment before Flyte and torch are used is put there here."""

import os

# A local cache entry is a path, which dangles once its folder is deleted; artifacts are found by their content instead.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
# Threads that wait for each other by spinning take the cores from the engines' processes, and the other way round:
# on two busy cores an update takes up to 15 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
