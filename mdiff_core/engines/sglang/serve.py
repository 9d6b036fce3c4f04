"""The server's main module: `python -m mdiff_core.engines.sglang.serve serve --model-path ...`; its workers import it again."""

import torch

if "empty_cache" not in vars(torch.cpu):  # SGLang 0.5.17 calls it after merging a LoRA, on whatever device it runs
    vars(torch.cpu)["empty_cache"] = lambda: None

if __name__ == "__main__":
    from sglang.cli.main import main

    main()
